"""Waveforms to the bytes of audio files, whole and piece by piece. Mono, 24 kHz, 16 bit."""

import io
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import soundfile

from omni_server.audio.formats import STREAMABLE_FORMATS, AudioFormat
from omni_server.errors import OmniError
from omni_server.types import SAMPLE_RATE_HZ

_BYTES_PER_SAMPLE = 2
_WAV_HEADER_BYTES = 44
_ONE_SAMPLE = np.zeros(1, dtype=np.int16)
_UNKNOWN_DATA_BYTES = 0x7FFF_FFFF - (_WAV_HEADER_BYTES - 8)
"""The data size of a WAV file whose length is not known yet. With it the RIFF size is 0x7FFFFFFF, which fits
a signed 32-bit number; readers then take what is there. A size of 0 would read as an empty file, and 0xFFFFFFFF
would wrap around in the RIFF size."""


@dataclass(frozen=True)
class _Container:
    """How libsndfile is asked for a format (`soundfile.SoundFile`'s arguments of the same names)."""

    format: str
    subtype: str
    bitrate_mode: str | None = None
    compression_level: float | None = None


_CONTAINERS: dict[AudioFormat, _Container] = {
    "flac": _Container("FLAC", "PCM_16"),
    "opus": _Container("OGG", "OPUS"),
    # libsndfile's default is a variable bit rate that fell to 14 kbit/s on a sine; this one gives 80 kbit/s at 24 kHz.
    "mp3": _Container("MP3", "MPEG_LAYER_III", bitrate_mode="CONSTANT", compression_level=0.5),
}


def to_int16(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.int16]:
    """Samples [num_samples] in [-1, 1] as little-endian int16; what lies outside saturates.

    The inverse of the division by 32768 that readers of 16-bit audio do. Raises `OmniError` if a sample is not
    finite: that is a fault of the model and must not reach a loudspeaker.
    """
    scaled = np.rint(np.asarray(samples, dtype=np.float32) * np.float32(32768.0))
    if not np.isfinite(scaled).all():
        raise OmniError("The model produced a waveform with values that are not finite.")
    pcm: npt.NDArray[np.int16] = np.clip(scaled, -32768, 32767).astype("<i2")
    return pcm


def encode(samples: npt.NDArray[np.float32], format: AudioFormat) -> bytes:
    """A complete file of `samples` [num_samples], float32 at 24 kHz.

    No samples give an empty `pcm16`, a `wav` of no samples, and one sample of silence in the other formats, of
    which libsndfile writes no file that a reader would open. Raises `OmniError` as `to_int16` does.
    """
    pcm = to_int16(samples)
    if format == "pcm16":
        return pcm.tobytes()
    if format == "wav":
        return _wav_header(pcm.nbytes) + pcm.tobytes()
    container = _CONTAINERS[format]
    file = io.BytesIO()
    with _open(file, container) as writer:
        writer.write(pcm if pcm.size else _ONE_SAMPLE)
    return file.getvalue()


def _open(file: "io.BytesIO | _Outflow", container: _Container) -> soundfile.SoundFile:
    return soundfile.SoundFile(
        file,
        "w",
        samplerate=SAMPLE_RATE_HZ,
        channels=1,
        format=container.format,
        subtype=container.subtype,
        bitrate_mode=container.bitrate_mode,
        compression_level=container.compression_level,
    )


class StreamEncoder:
    """Encodes a waveform piece by piece; the pieces joined are one file.

    Takes the formats of `STREAMABLE_FORMATS`, others raise `ValueError`. A `wav` declares the greatest length,
    since its own is not known when the header leaves. An `mp3` lacks the frame that tells its length and how many
    samples to cut off at its ends: players add up to 0.12 s of silence. Encoding a second of it takes milliseconds.
    """

    def __init__(self, format: AudioFormat) -> None:
        if format not in STREAMABLE_FORMATS:
            raise ValueError(f"{format} cannot be streamed")
        self._header = _wav_header(_UNKNOWN_DATA_BYTES) if format == "wav" else b""
        self._mp3 = _Mp3Stream() if format == "mp3" else None
        self._closed = False

    @property
    def is_quick(self) -> bool:
        """Writing a second takes microseconds. Otherwise it belongs in a thread, or all other requests wait for it."""
        return self._mp3 is None

    def write(self, samples: npt.NDArray[np.float32]) -> bytes:
        """Bytes of the next samples [num_samples], the first time after the header.

        Raises `OmniError` as `to_int16` does.
        """
        if self._closed:
            raise ValueError("write after close")
        pcm = to_int16(samples)
        if self._mp3 is not None:
            return self._mp3.write(pcm)
        header, self._header = self._header, b""
        return header + pcm.tobytes()

    def close(self) -> bytes:
        """What is left to send: the header of a `wav` of which nothing was written, the last frames of an `mp3`."""
        if self._closed:
            return b""
        self._closed = True
        if self._mp3 is not None:
            return self._mp3.close()
        header, self._header = self._header, b""
        return header


class _Mp3Stream:
    def __init__(self) -> None:
        self._outflow = _Outflow()
        self._writer = _open(self._outflow, _CONTAINERS["mp3"])
        self._is_empty = True

    def write(self, pcm: npt.NDArray[np.int16]) -> bytes:
        self._is_empty &= not pcm.size
        self._writer.write(pcm)
        return self._outflow.take()

    def close(self) -> bytes:
        if self._is_empty:
            self._writer.write(_ONE_SAMPLE)
        self._writer.close()
        return self._outflow.take()


class _Outflow:
    """The file that libsndfile writes to, as far as it needs one. What is written can be taken away at once.

    When it closes a file libsndfile goes back to fill in the first frame. That has been sent by then as a frame of
    silence, and stays one.
    """

    def __init__(self) -> None:
        self._new = bytearray()
        self._position = 0
        self._length = 0

    def take(self) -> bytes:
        """What has been written since the last call."""
        taken, self._new = bytes(self._new), bytearray()
        return taken

    def write(self, data: bytes) -> int:
        data = bytes(data)  # libsndfile's own memory
        self._new += data[self._length - self._position :]
        self._position += len(data)
        self._length = max(self._length, self._position)
        return len(data)

    def read(self, size: int = -1) -> bytes:
        return b""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position


def _wav_header(data_bytes: int) -> bytes:
    """The 44 bytes before the samples of a RIFF/WAVE file with one `fmt ` and one `data` chunk."""
    byte_rate = SAMPLE_RATE_HZ * _BYTES_PER_SAMPLE
    return (
        b"RIFF"
        + struct.pack("<I", data_bytes + _WAV_HEADER_BYTES - 8)
        + b"WAVEfmt "
        + struct.pack("<IHHIIHH", 16, 1, 1, SAMPLE_RATE_HZ, byte_rate, _BYTES_PER_SAMPLE, 8 * _BYTES_PER_SAMPLE)
        + b"data"
        + struct.pack("<I", data_bytes)
    )
