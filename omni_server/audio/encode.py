"""Encodes waveforms as audio files, whole or piece by piece: mono, 24 kHz, 16-bit."""

import io
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import av
import numpy as np
import numpy.typing as npt

from omni_server.audio.formats import AudioFormat
from omni_server.errors import OmniError
from omni_server.types import SAMPLE_RATE_HZ

_BYTES_PER_SAMPLE = 2
_WAV_HEADER_BYTES = 44
_ONE_SAMPLE = np.zeros(1, dtype=np.int16)
_UNKNOWN_DATA_BYTES = 0x7FFF_FFFF - (_WAV_HEADER_BYTES - 8)
"""The data size of a WAV file whose length is not known yet. It makes the RIFF size 0x7FFFFFFF, which fits a
signed 32-bit number; readers then read what is there. A size of 0 would read as an empty file, and 0xFFFFFFFF
would wrap around in the RIFF size."""


@dataclass(frozen=True)
class _Codec:
    """FFmpeg's names for a container and an encoder."""

    container: str
    encoder: str
    bit_rate: int | None = None
    """Bits per second; None for a lossless encoder."""
    options: Mapping[str, str] = field(default_factory=dict)
    """For the container."""


_CODECS: dict[AudioFormat, _Codec] = {
    "mp3": _Codec("mp3", "libmp3lame", 80_000, {"id3v2_version": "0"}),
    "opus": _Codec("ogg", "libopus", 64_000, {"page_duration": "100000"}),  # in us; a second by default
    "aac": _Codec("adts", "aac", 80_000),
    "flac": _Codec("flac", "flac"),
}


def to_int16(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Converts samples [num_samples] in [-1, 1] to little-endian int16; values outside saturate.

    Inverts the division by 32768 in readers of 16-bit audio. Raises `OmniError` if a sample is not finite,
    which is a fault of the model and must not be played.
    """
    scaled = np.rint(np.asarray(samples, dtype=np.float32) * np.float32(32768.0))
    if not np.isfinite(scaled).all():
        raise OmniError("The model produced a waveform with values that are not finite.")
    pcm: npt.NDArray[np.int16] = np.clip(scaled, -32768, 32767).astype("<i2")
    return pcm


def encode(samples: npt.NDArray[np.float32], format: AudioFormat) -> bytes:
    """Returns a complete file of `samples`, float32 [num_samples] at 24 kHz.

    Without samples, `pcm16` is empty, `wav` is a header, and the other formats hold one sample of silence,
    because readers refuse a file without any. Raises `OmniError` like `to_int16`.
    """
    encoder = StreamEncoder(format, is_whole=True)
    encoder.write(samples)
    return encoder.close()


class StreamEncoder:
    """Encodes a waveform piece by piece. Encoding a second to a compressed format takes milliseconds.

    The joined pieces are one file, which does not declare its real length: a `wav` declares the maximum, a
    `flac` none, and an `mp3` lacks the frame with the number of samples to trim at its ends, so players add
    up to 0.12 s of silence. With `is_whole`, `close` returns the whole file, which declares its length, and
    `write` returns nothing."""

    def __init__(self, format: AudioFormat, *, is_whole: bool = False) -> None:
        self._file: io.BytesIO | _Outflow = io.BytesIO() if is_whole else _Outflow()
        self._is_wav = format == "wav"
        if self._is_wav:
            self._file.write(_wav_header(_UNKNOWN_DATA_BYTES))
        self._writer = _CompressedWriter(self._file, _CODECS[format]) if format in _CODECS else None
        self._closed = False

    @property
    def num_kept(self) -> int:
        """Bytes that `close` will return, so far; 0 unless the file is returned as a whole."""
        return self._file.tell() if isinstance(self._file, io.BytesIO) else 0

    @property
    def is_quick(self) -> bool:
        """Writing a second takes microseconds. Otherwise, write in a thread: others would wait."""
        return self._writer is None

    def write(self, samples: npt.NDArray[np.float32]) -> bytes:
        """Returns the bytes of the next samples [num_samples], preceded by the header in the first call.

        Raises `OmniError` like `to_int16`.
        """
        if self._closed:
            raise ValueError("write after close")
        pcm = to_int16(samples)
        if self._writer is not None:
            self._writer.write(pcm)
        else:
            self._file.write(pcm.tobytes())
        return b"" if isinstance(self._file, io.BytesIO) else self._file.take()

    def close(self) -> bytes:
        """Returns the rest: the header of a `wav` without samples, the last frames of other formats."""
        if self._writer is not None and not self._closed:
            self._writer.close()
        self._closed = True
        if not isinstance(self._file, io.BytesIO):
            return self._file.take()
        if self._is_wav:
            data_bytes = self._file.tell() - _WAV_HEADER_BYTES
            self._file.seek(0)
            self._file.write(_wav_header(data_bytes))
        with self._file:  # a closed one keeps no copy
            return self._file.getvalue()


class _CompressedWriter:
    """Writes one file in one of `_CODECS` with FFmpeg. `file` need not be seekable."""

    def __init__(self, file: "io.BytesIO | _Outflow", codec: _Codec) -> None:
        # Without bitexact, Ogg's stream number is random and files name the version of FFmpeg.
        options = {"fflags": "+bitexact", **codec.options}
        self._container = av.open(file, "w", format=codec.container, options=options)
        # In PyAV, container and stream refer to each other until the container is closed; an abandoned answer
        # would leave megabytes to the garbage collector, which does not see them.
        weakref.finalize(self, self._container.close)
        stream = self._container.add_stream(codec.encoder, rate=SAMPLE_RATE_HZ, layout="mono")
        assert isinstance(stream, av.AudioStream)
        if codec.bit_rate is not None:
            stream.bit_rate = codec.bit_rate
        self._stream = stream
        self._num_samples = 0

    def write(self, pcm: npt.NDArray[np.int16]) -> None:
        """`pcm` [num_samples]."""
        if not pcm.size:
            return
        frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
        frame.sample_rate = SAMPLE_RATE_HZ
        frame.time_base = Fraction(1, SAMPLE_RATE_HZ)
        frame.pts = self._num_samples
        self._num_samples += pcm.size
        self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        if not self._num_samples:
            self.write(_ONE_SAMPLE)
        self._container.mux(self._stream.encode(None))
        self._container.close()


class _Outflow:
    """An append-only file; `take` removes and returns what was written."""

    def __init__(self) -> None:
        self._new = bytearray()

    def write(self, data: bytes) -> int:
        self._new += data
        return len(data)

    def take(self) -> bytes:
        """Returns the bytes written since the last call."""
        taken, self._new = bytes(self._new), bytearray()
        return taken


def _wav_header(data_bytes: int) -> bytes:
    """Returns the 44-byte header of a RIFF/WAVE file with one `fmt ` and one `data` chunk."""
    byte_rate = SAMPLE_RATE_HZ * _BYTES_PER_SAMPLE
    bits = 8 * _BYTES_PER_SAMPLE
    riff = struct.pack("<4sI", b"RIFF", data_bytes + _WAV_HEADER_BYTES - 8)
    form = struct.pack("<IHHIIHH", 16, 1, 1, SAMPLE_RATE_HZ, byte_rate, _BYTES_PER_SAMPLE, bits)
    return riff + b"WAVEfmt " + form + struct.pack("<4sI", b"data", data_bytes)
