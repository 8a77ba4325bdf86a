"""The audio formats of events: 16-bit PCM at 24 kHz, and G.711 in both laws at 8 kHz."""

import io
from functools import cache

import numpy as np
import numpy.typing as npt
import soundfile

from omni_server.api.realtime.session_config import G711Format, Law, WireFormat
from omni_server.audio.encode import to_int16
from omni_server.audio.filters import Resampler
from omni_server.errors import InvalidRequestError
from omni_server.media.source import decode_base64
from omni_server.types import SAMPLE_RATE_HZ

Samples = npt.NDArray[np.int16]

MAX_APPEND_BYTES = 15 * 1024 * 1024
"""Bytes of audio per event; OpenAI's limit."""


def decode_audio(text: str, format: WireFormat, param: str) -> Samples:
    """Decodes base64 to samples [num_samples] at `format.rate_hz`. Raises `InvalidRequestError`."""
    if not text:
        return np.zeros(0, dtype=np.int16)
    try:
        data = decode_base64(text)
    except InvalidRequestError:
        raise InvalidRequestError(f"Invalid '{param}': expected base64.", param=param) from None
    if len(data) > MAX_APPEND_BYTES:
        raise InvalidRequestError(
            f"Invalid '{param}': at most {MAX_APPEND_BYTES} bytes of audio are allowed.", param=param
        )
    if isinstance(format, G711Format):
        return decode_g711(data, format.law)
    if len(data) % 2:
        raise InvalidRequestError(
            f"Invalid '{param}': 16-bit audio has an even number of bytes.", param=param
        )
    return np.frombuffer(data, dtype="<i2").astype(np.int16)


class OutputEncoder:
    """Encodes a waveform piece by piece."""

    def __init__(self, format: WireFormat) -> None:
        self._law = format.law if isinstance(format, G711Format) else None
        self._resampler = Resampler(SAMPLE_RATE_HZ, format.rate_hz)

    def write(self, samples: npt.NDArray[np.float32]) -> bytes:
        """Returns whole samples. `samples`: [num_samples], 24 kHz. Raises `OmniError` if one is not
        finite."""
        if self._law is None:
            return to_int16(samples).tobytes()
        return encode_g711(to_int16(self._resampler.push(samples)), self._law)

    def close(self) -> bytes:
        """Returns the rest of the encoded audio."""
        return encode_g711(to_int16(self._resampler.flush()), self._law) if self._law is not None else b""


def decode_g711(data: bytes, law: Law) -> Samples:
    """Returns samples [len(data)] at 8 kHz."""
    samples: Samples = _decoded(law)[np.frombuffer(data, dtype=np.uint8)]
    return samples


def encode_g711(samples: Samples, law: Law) -> bytes:
    """Returns one byte per sample of `samples` [num_samples]."""
    return _encoded(law)[samples.astype(np.int32) + 32768].tobytes()


@cache
def _decoded(law: Law) -> Samples:
    """libsndfile's table [256], indexed by code."""
    codes = io.BytesIO(bytes(range(256)))
    samples, _ = soundfile.read(
        codes, dtype="int16", format="RAW", subtype=law, samplerate=G711Format.rate_hz, channels=1
    )
    table: Samples = samples
    return table


@cache
def _encoded(law: Law) -> npt.NDArray[np.uint8]:
    """libsndfile's table [65536], indexed by sample + 32768."""
    file = io.BytesIO()
    every_sample = np.arange(-32768, 32768).astype(np.int16)
    soundfile.write(file, every_sample, G711Format.rate_hz, format="RAW", subtype=law)
    return np.frombuffer(file.getvalue(), dtype=np.uint8)
