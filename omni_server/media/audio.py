"""Sound files to mono waveforms, with libsndfile."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import soundfile

from omni_server.errors import InvalidRequestError
from omni_server.media.limits import MediaLimits
from omni_server.types import SAMPLE_RATE_HZ, AudioPart

_MIN_RATE_HZ = 4_000
_MAX_RATE_HZ = 192_000
_MAX_CHANNELS = 8
_BLOCK_FRAMES = 1 << 16
_UNKNOWN_FRAMES = (1 << 63) - 1
"""libsndfile's `SF_COUNT_MAX`: what it says of a FLAC stream written to a pipe. It cannot read one either."""


def decode_audio(data: bytes, limits: MediaLimits, declared_format: str | None = None) -> AudioPart:
    """The waveform at the file's own rate, what lies outside [-1, 1] clipped, its channels averaged.

    Takes WAV, FLAC, Ogg (Opus, Vorbis, FLAC) and MP3, told apart by their bytes. `declared_format` counts only
    where it is "pcm16" or "pcm" and the bytes have no file header: then they are int16, little-endian, mono, 24 kHz.

    Raises `InvalidRequestError` with code `invalid_audio`.
    """
    _check_bytes(data, limits)
    is_raw = declared_format in ("pcm16", "pcm") and not _has_file_header(data)
    if is_raw:
        samples, rate = _decode_pcm16(data), SAMPLE_RATE_HZ
        _check_length(samples.size, rate, limits)
    else:
        with _open(data, limits) as file:
            samples, rate = _read_mono(file), file.samplerate
    if samples.size < limits.min_audio_seconds * rate:
        raise _invalid(f"is shorter than {limits.min_audio_seconds:g} s")
    return AudioPart(samples, rate)


def count_samples(data: bytes, limits: MediaLimits) -> int:
    """How many samples `decode_audio` gives of a file, by its header alone: a damaged one may give fewer.

    Raises `InvalidRequestError` as `decode_audio` does, for what it can tell by the header.
    """
    _check_bytes(data, limits)
    with _open(data, limits) as file:
        return int(file.frames)


def _check_bytes(data: bytes, limits: MediaLimits) -> None:
    if len(data) > limits.max_bytes:
        raise _invalid(f"is larger than the {limits.max_bytes} bytes allowed")


def _has_file_header(data: bytes) -> bool:
    is_wav = data[:4] in (b"RIFF", b"RIFX", b"RF64") and data[8:12] == b"WAVE"
    return is_wav or data[:4] in (b"fLaC", b"OggS") or data[:3] == b"ID3"


def _has_mpeg_sync(data: bytes) -> bool:
    """Eleven set bits start a frame of MPEG audio. Too weak a mark to overrule a declared pcm16: -1 has it as well."""
    return len(data) > 2 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0


def _decode_pcm16(data: bytes) -> npt.NDArray[np.float32]:
    if len(data) % 2:
        raise _invalid("is declared as pcm16 and has an odd number of bytes")
    return np.frombuffer(data, dtype="<i2").astype(np.float32) / np.float32(32768.0)


@contextmanager
def _open(data: bytes, limits: MediaLimits) -> Iterator[soundfile.SoundFile]:
    """Raises `InvalidRequestError` for what is no sound file within the limits, also out of the block."""
    if not _has_file_header(data) and not _has_mpeg_sync(data):
        raise _invalid("is not in a known format (wav, mp3, flac, ogg; headerless pcm16 must be declared as such)")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_stream(file, limits)
            yield file
    except soundfile.LibsndfileError as error:
        raise _invalid("is damaged or in a format that this server cannot read") from error


def _check_stream(file: soundfile.SoundFile, limits: MediaLimits) -> None:
    """Refuse by the header alone what would take too much memory."""
    if not _MIN_RATE_HZ <= file.samplerate <= _MAX_RATE_HZ:
        raise _invalid(f"has a sample rate outside {_MIN_RATE_HZ} to {_MAX_RATE_HZ} Hz")
    if file.channels > _MAX_CHANNELS:
        raise _invalid(f"has more than {_MAX_CHANNELS} channels")
    if file.frames == _UNKNOWN_FRAMES:
        raise _invalid("does not declare its length")
    _check_length(file.frames, file.samplerate, limits)


def _check_length(num_samples: int, rate: int, limits: MediaLimits) -> None:
    if num_samples > limits.max_audio_seconds * rate:
        raise _invalid(f"is longer than {limits.max_audio_seconds:g} s")
    if num_samples > limits.max_audio_samples:
        raise _invalid(f"has more than {limits.max_audio_samples} samples at its rate of {rate} Hz")


def _read_mono(file: soundfile.SoundFile) -> npt.NDArray[np.float32]:
    """All samples [num_samples], at most as many as declared; in blocks, so that only one channel is ever whole."""
    # Memory is taken as it is written to, not for what a header only claims.
    samples = np.empty(file.frames, dtype=np.float32)
    end = 0
    for block in file.blocks(_BLOCK_FRAMES, dtype="float32", always_2d=True):
        if not np.isfinite(block).all():
            raise _invalid("has samples that are not finite numbers")
        begin, end = end, end + len(block)
        np.clip(block, -1.0, 1.0).mean(axis=1, dtype=np.float32, out=samples[begin:end])
    return samples if end == len(samples) else samples[:end].copy()


def _invalid(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"The audio {what}.", code="invalid_audio")
