"""The three audio formats of events: 16-bit PCM at 24 kHz, and G.711 (the telephone network's) at 8 kHz."""

import io
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import soundfile

from omni_server.api.realtime.session_config import AlawFormat, PcmFormat, UlawFormat, WireFormat
from omni_server.audio.encode import to_int16
from omni_server.audio.filters import Resampler
from omni_server.errors import InvalidRequestError
from omni_server.media.source import decode_base64
from omni_server.types import SAMPLE_RATE_HZ

Samples = npt.NDArray[np.int16]
Law = Literal["ULAW", "ALAW"]

MAX_APPEND_BYTES = 15 * 1024 * 1024
"""Of audio in one event; what OpenAI allows."""
_G711_RATE_HZ = 8_000


def rate_of(format: WireFormat) -> int:
    """Hz."""
    return SAMPLE_RATE_HZ if isinstance(format, PcmFormat) else _G711_RATE_HZ


def seconds_of(text: str, format: WireFormat) -> float:
    """About how long the audio in base64 lasts, without decoding it."""
    bytes_per_sample = 2 if isinstance(format, PcmFormat) else 1
    return len(text) * 3 / 4 / bytes_per_sample / rate_of(format)


def decode_audio(text: str, format: WireFormat, param: str) -> Samples:
    """Base64 as samples [num_samples] at `rate_of(format)`. Raises `InvalidRequestError`."""
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
    if not isinstance(format, PcmFormat):
        return decode_g711(data, _law(format))
    if len(data) % 2:
        raise InvalidRequestError(
            f"Invalid '{param}': 16-bit audio has an even number of bytes.", param=param
        )
    return np.frombuffer(data, dtype="<i2").astype(np.int16)


class OutputEncoder:
    """Encodes a waveform in a format, piece by piece."""

    def __init__(self, format: WireFormat) -> None:
        self._g711 = (
            None
            if isinstance(format, PcmFormat)
            else (_law(format), Resampler(SAMPLE_RATE_HZ, _G711_RATE_HZ))
        )

    def write(self, samples: npt.NDArray[np.float32]) -> bytes:
        """Whole samples. `samples` [num_samples] at 24 kHz. Raises `OmniError` if one is not finite."""
        if self._g711 is None:
            return to_int16(samples).tobytes()
        law, resampler = self._g711
        return encode_g711(to_int16(resampler.push(samples)), law)

    def close(self) -> bytes:
        """The rest of the encoded audio."""
        if self._g711 is None:
            return b""
        law, resampler = self._g711
        return encode_g711(to_int16(resampler.flush()), law)


def decode_g711(data: bytes, law: Law) -> Samples:
    """Samples [len(data)] at 8 kHz."""
    samples: Samples = _decoded(law)[np.frombuffer(data, dtype=np.uint8)]
    return samples


def encode_g711(samples: Samples, law: Law) -> bytes:
    """One byte per sample of `samples` [num_samples]."""
    return _encoded(law)[samples.astype(np.int32) + 32768].tobytes()


def _law(format: UlawFormat | AlawFormat) -> Law:
    return "ULAW" if isinstance(format, UlawFormat) else "ALAW"


@cache
def _decoded(law: Law) -> Samples:
    """libsndfile's table, by code, [256]."""
    codes = io.BytesIO(bytes(range(256)))
    samples, _ = soundfile.read(
        codes, dtype="int16", format="RAW", subtype=law, samplerate=_G711_RATE_HZ, channels=1
    )
    table: Samples = samples
    return table


@cache
def _encoded(law: Law) -> npt.NDArray[np.uint8]:
    """libsndfile's table, by sample + 32768, [65536]."""
    file = io.BytesIO()
    every_sample = np.arange(-32768, 32768).astype(np.int16)
    soundfile.write(file, every_sample, _G711_RATE_HZ, format="RAW", subtype=law)
    return np.frombuffer(file.getvalue(), dtype=np.uint8)
