"""The three formats of sound on the wire: pcm16 at 24 kHz, and G.711 at 8 kHz."""

import numpy as np
import numpy.typing as npt

from omni_server.api.realtime.session import AlawFormat, PcmFormat, UlawFormat, WireFormat
from omni_server.audio.encode import to_int16
from omni_server.audio.g711 import G711_RATE_HZ, Law, decode_g711, encode_g711
from omni_server.audio.resample import Resampler
from omni_server.errors import InvalidRequestError
from omni_server.media.source import decode_base64
from omni_server.types import SAMPLE_RATE_HZ

MAX_APPEND_BYTES = 15 * 1024 * 1024
"""Of sound in one event; what OpenAI allows."""


def rate_of(format: WireFormat) -> int:
    """Hz."""
    return SAMPLE_RATE_HZ if isinstance(format, PcmFormat) else G711_RATE_HZ


def seconds_of(text: str, format: WireFormat) -> float:
    """About how long the sound in base64 lasts, without decoding it."""
    bytes_per_sample = 2 if isinstance(format, PcmFormat) else 1
    return len(text) * 3 / 4 / bytes_per_sample / rate_of(format)


def decode_audio(text: str, format: WireFormat, param: str) -> npt.NDArray[np.int16]:
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
        raise InvalidRequestError(f"Invalid '{param}': an odd number of bytes is no 16-bit audio.", param=param)
    return np.frombuffer(data, dtype="<i2").astype(np.int16)


class OutputEncoder:
    """A waveform, piece by piece, as bytes of a format."""

    def __init__(self, format: WireFormat) -> None:
        self._law = None if isinstance(format, PcmFormat) else _law(format)
        self._resampler = None if self._law is None else Resampler(SAMPLE_RATE_HZ, G711_RATE_HZ)

    def write(self, samples: npt.NDArray[np.float32]) -> bytes:
        """Whole samples. `samples` [num_samples] at 24 kHz. Raises `OmniError` if one is not finite."""
        if self._resampler is None or self._law is None:
            return to_int16(samples).tobytes()
        return encode_g711(to_int16(self._resampler.push(samples)), self._law)

    def close(self) -> bytes:
        """What is left to send."""
        if self._resampler is None or self._law is None:
            return b""
        return encode_g711(to_int16(self._resampler.flush()), self._law)


def _law(format: UlawFormat | AlawFormat) -> Law:
    return "ULAW" if isinstance(format, UlawFormat) else "ALAW"
