"""Sound files to mono waveforms: with libsndfile, and what that does not know by `sound_track`."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import soundfile

from omni_server.media.audio_checks import check_length, check_stream, damaged_audio, invalid_audio, mix_to_mono
from omni_server.media.limited_process import Cancellation
from omni_server.media.limits import MediaLimits
from omni_server.media.sound_track import container_of, count_sound_track, read_sound_track
from omni_server.types import SAMPLE_RATE_HZ, AudioPart

_BLOCK_FRAMES = 1 << 16
_UNKNOWN_FRAMES = (1 << 63) - 1
"""libsndfile's `SF_COUNT_MAX`: what it says of a FLAC stream written to a pipe. It cannot read one either."""


def decode_audio(
    data: bytes,
    limits: MediaLimits,
    declared_format: str | None = None,
    cancellation: Cancellation | None = None,
) -> AudioPart:
    """The waveform at the file's own rate, what lies outside [-1, 1] clipped, its channels averaged.

    Takes WAV, FLAC, Ogg (Opus, Vorbis, FLAC), MP3, WebM and Matroska, MP4 (M4A, QuickTime), told apart by their
    bytes; of several sound tracks the first. `declared_format` counts only where it is "pcm16" or "pcm" and the bytes
    have no file header: then they are int16, little-endian, mono, 24 kHz.

    Raises `InvalidRequestError` with code `invalid_audio`. `cancellation` ends a process that decodes, not this one's
    own work.
    """
    _check_bytes(data, limits)
    container = container_of(data)
    is_raw = declared_format in ("pcm16", "pcm") and container is None and not _has_file_header(data)
    if is_raw:
        samples, rate = _decode_pcm16(data), SAMPLE_RATE_HZ
        check_length(samples.size, rate, limits)
    elif container is not None:
        samples, rate = read_sound_track(data, container, limits, cancellation or Cancellation())
    else:
        with _open(data, limits) as file:
            samples, rate = _read_mono(file), file.samplerate
    if samples.size < limits.min_audio_seconds * rate:
        raise invalid_audio(f"is shorter than {limits.min_audio_seconds:g} s")
    return AudioPart(samples, rate)


def count_samples(data: bytes, limits: MediaLimits, cancellation: Cancellation | None = None) -> int:
    """How many samples `decode_audio` gives of a file, without keeping them. By its header alone, where that tells: a
    damaged file may give fewer.

    Raises `InvalidRequestError` as `decode_audio` does, for what it can tell.
    """
    _check_bytes(data, limits)
    container = container_of(data)
    if container is not None:
        return count_sound_track(data, container, limits, cancellation or Cancellation())
    with _open(data, limits) as file:
        return int(file.frames)


def _check_bytes(data: bytes, limits: MediaLimits) -> None:
    if len(data) > limits.max_bytes:
        raise invalid_audio(f"is larger than the {limits.max_bytes} bytes allowed")


def _has_file_header(data: bytes) -> bool:
    is_wav = data[:4] in (b"RIFF", b"RIFX", b"RF64") and data[8:12] == b"WAVE"
    return is_wav or data[:4] in (b"fLaC", b"OggS") or data[:3] == b"ID3"


def _has_mpeg_sync(data: bytes) -> bool:
    """Eleven set bits start a frame of MPEG audio. Too weak a mark to overrule a declared pcm16: -1 has it as well."""
    return len(data) > 2 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0


def _decode_pcm16(data: bytes) -> npt.NDArray[np.float32]:
    if len(data) % 2:
        raise invalid_audio("is declared as pcm16 and has an odd number of bytes")
    return np.frombuffer(data, dtype="<i2").astype(np.float32) / np.float32(32768.0)


@contextmanager
def _open(data: bytes, limits: MediaLimits) -> Iterator[soundfile.SoundFile]:
    """Raises `InvalidRequestError` for what is no sound file within the limits, also out of the block."""
    if not _has_file_header(data) and not _has_mpeg_sync(data):
        raise invalid_audio(
            "is not in a known format (wav, mp3, flac, ogg, webm, mp4; headerless pcm16 must be declared as such)"
        )
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_stream(file, limits)
            yield file
    except soundfile.LibsndfileError as error:
        raise damaged_audio() from error


def _check_stream(file: soundfile.SoundFile, limits: MediaLimits) -> None:
    """Refuse by the header alone what would take too much memory."""
    check_stream(file.samplerate, file.channels)
    if file.frames == _UNKNOWN_FRAMES:
        raise invalid_audio("does not declare its length")
    check_length(file.frames, file.samplerate, limits)


def _read_mono(file: soundfile.SoundFile) -> npt.NDArray[np.float32]:
    """All samples [num_samples], at most as many as declared; in blocks, so that only one channel is ever whole."""
    # Memory is taken as it is written to, not for what a header only claims.
    samples = np.empty(file.frames, dtype=np.float32)
    end = 0
    for block in file.blocks(_BLOCK_FRAMES, dtype="float32", always_2d=True):
        begin, end = end, end + len(block)
        mix_to_mono(block, samples[begin:end])
    return samples if end == len(samples) else samples[:end].copy()
