"""Decodes audio files to mono waveforms: with libsndfile, or, for WebM, Matroska, MP4, M4A and QuickTime,
with FFmpeg in a separate process."""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile

from omni_server.errors import InvalidRequestError
from omni_server.media.limited_process import Cancellation, Output, Reader, read_in_process
from omni_server.media.limits import MediaLimits
from omni_server.types import SAMPLE_RATE_HZ, AudioPart

_MIN_RATE_HZ = 4_000
_MAX_RATE_HZ = 192_000
_MAX_CHANNELS = 8
_BLOCK_FRAMES = 1 << 16
_SAMPLE_BYTES = 4
_UNKNOWN_FRAMES = (1 << 63) - 1
"""libsndfile's `SF_COUNT_MAX`: the length that it reports for a FLAC stream written to a pipe, which it
cannot read."""

_MODULE = Path(__file__).with_name("read_audio_track.py")
_HEADER_BYTES = 8
_DAMAGED, _NO_AUDIO, _EMPTY = 3, 4, 5
"""The module's exit statuses and the size of its `HEADER`: importing it would load FFmpeg."""
_MAX_MEMORY_BYTES = 512 * 1024 * 1024
"""Address space of the process. Python, FFmpeg and a decoder use 150 MiB of it."""


def decode_audio(
    data: bytes,
    limits: MediaLimits,
    declared_format: str | None = None,
    cancellation: Cancellation | None = None,
) -> AudioPart:
    """Returns the waveform at the file's own rate, clipped to [-1, 1], with its channels averaged.

    Accepts WAV, FLAC, Ogg (Opus, Vorbis, FLAC), MP3, WebM and Matroska, MP4 (M4A, QuickTime), detected from
    the bytes, and uses the first audio track. `declared_format` matters only if it is "pcm16" or "pcm" and
    the bytes have no file header: then they are int16, little-endian, mono, 24 kHz.

    Raises `InvalidRequestError` with code `invalid_audio`. `cancellation` ends a decoding process, but not
    decoding in this process.
    """
    with _open(data, declared_format, limits, cancellation) as (rate, _, blocks):
        return _waveform(rate, blocks, limits)


def decode_audio_track(
    data: bytes, limits: MediaLimits, cancellation: Cancellation | None = None
) -> AudioPart | None:
    """Returns the waveform of a video's first audio track as `decode_audio` does, or None without a track or
    with an empty one.

    `data` is a file of the formats that `decode_video` accepts. Raises `InvalidRequestError` with code
    `invalid_audio`.
    """
    container = _container_of(data) or "avi"
    try:
        with _open_track(data, container, limits, cancellation or Cancellation()) as (rate, blocks):
            return _waveform(rate, blocks, limits)
    except _NoAudioTrackError:
        return None


def count_samples(data: bytes, limits: MediaLimits, cancellation: Cancellation | None = None) -> int:
    """Counts the samples that `decode_audio` would return, without keeping them. Uses the header alone if it
    declares them: a damaged file may have fewer.

    Raises `InvalidRequestError` as `decode_audio` does, for faults that the header shows.
    """
    with _open(data, None, limits, cancellation) as (rate, declared, blocks):
        if declared is not None:
            return declared
        num_samples = 0
        for block in blocks:
            num_samples += len(block)
            _check_length(num_samples, rate, limits)
        return num_samples


class _NoAudioTrackError(InvalidRequestError):
    """The file may be a video."""


_Blocks = Iterable[npt.NDArray[np.float32]]
"""Each [num_samples, num_channels]."""


def _waveform(rate_hz: int, blocks: _Blocks, limits: MediaLimits) -> AudioPart:
    samples = bytearray()
    for block in blocks:
        samples += _mono(block).data
        _check_length(len(samples) // _SAMPLE_BYTES, rate_hz, limits)
    if len(samples) < limits.min_audio_seconds * rate_hz * _SAMPLE_BYTES:
        raise _invalid(f"is shorter than {limits.min_audio_seconds:g} s")
    return AudioPart(np.frombuffer(samples, dtype=np.float32), rate_hz)


@contextmanager
def _open(
    data: bytes, declared_format: str | None, limits: MediaLimits, cancellation: Cancellation | None
) -> Iterator[tuple[int, int | None, _Blocks]]:
    """Yields the rate in Hz, the number of samples if a trusted header has it, and the samples.

    Raises `InvalidRequestError`, also inside the block, unless it is an audio file within the limits.
    """
    if len(data) > limits.max_bytes:
        raise _invalid(f"is larger than the {limits.max_bytes} bytes allowed")
    container = _container_of(data)
    if container is not None:
        # Browser recordings declare a length of 0 or none.
        with _open_track(data, container, limits, cancellation or Cancellation()) as (rate, blocks):
            yield rate, None, blocks
        return
    if not _has_file_header(data):
        if declared_format in ("pcm16", "pcm"):
            samples = _decode_pcm16(data)
            yield SAMPLE_RATE_HZ, len(samples), [samples[:, None]]
            return
        if not _has_mpeg_sync(data):
            raise _invalid(
                "is not in a known format "
                "(wav, mp3, flac, ogg, webm, mp4; headerless pcm16 must be declared as such)"
            )
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            # A file that would take too much memory is refused by its header alone.
            _check_rate_and_channels(file.samplerate, file.channels)
            if file.frames == _UNKNOWN_FRAMES:
                raise _invalid("does not declare its length")
            _check_length(file.frames, file.samplerate, limits)
            blocks = file.blocks(_BLOCK_FRAMES, dtype="float32", always_2d=True)
            yield file.samplerate, int(file.frames), blocks
    except soundfile.LibsndfileError as error:
        raise _damaged() from error


def _has_file_header(data: bytes) -> bool:
    is_wav = data[:4] in (b"RIFF", b"RIFX", b"RF64") and data[8:12] == b"WAVE"
    return is_wav or data[:4] in (b"fLaC", b"OggS") or data[:3] == b"ID3"


def _has_mpeg_sync(data: bytes) -> bool:
    """MPEG frames start with eleven set bits. Too weak to override a declared pcm16: -1 has them too."""
    return len(data) > 2 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0


def _decode_pcm16(data: bytes) -> npt.NDArray[np.float32]:
    if len(data) % 2:
        raise _invalid("is declared as pcm16 and has an odd number of bytes")
    return np.frombuffer(data, dtype="<i2").astype(np.float32) / np.float32(32768.0)


def _container_of(data: bytes) -> str | None:
    """Returns FFmpeg's name for the format, or None if libsndfile reads the file."""
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    return "mov" if data[4:8] == b"ftyp" else None


@contextmanager
def _open_track(
    data: bytes, container: str, limits: MediaLimits, cancellation: Cancellation
) -> Iterator[tuple[int, _Blocks]]:
    """Yields the rate in Hz and the samples of the first audio track."""
    reader = Reader(
        module=_MODULE,
        arguments=[container],
        reads="the audio track",
        max_memory_bytes=_MAX_MEMORY_BYTES,
        max_cpu_s=int(limits.decode_timeout_s) + 1,
        timeout_s=limits.decode_timeout_s,
        refusals={
            _DAMAGED: _damaged(),
            _NO_AUDIO: _NoAudioTrackError("The file has no audio track.", code="invalid_audio"),
            _EMPTY: _NoAudioTrackError(_damaged().message, code="invalid_audio"),  # or cut off before it
        },
        too_slow=_invalid(f"could not be decoded within {limits.decode_timeout_s:g} s"),
    )
    with read_in_process(reader, data, cancellation) as output:
        header = output.read(_HEADER_BYTES)
        rate, num_channels = (int(value) for value in np.frombuffer(header, dtype=np.uint32))
        _check_rate_and_channels(rate, num_channels)
        yield rate, _blocks(output, num_channels)


def _blocks(output: Output, num_channels: int) -> Iterator[npt.NDArray[np.float32]]:
    frame_bytes = num_channels * _SAMPLE_BYTES
    rest = b""
    for chunk in output.chunks():
        data = rest + chunk
        end = len(data) - len(data) % frame_bytes
        rest = data[end:]
        yield np.frombuffer(data[:end], dtype=np.float32).reshape(-1, num_channels)


def _check_rate_and_channels(rate_hz: int, num_channels: int) -> None:
    if not _MIN_RATE_HZ <= rate_hz <= _MAX_RATE_HZ:
        raise _invalid(f"has a sample rate outside {_MIN_RATE_HZ} to {_MAX_RATE_HZ} Hz")
    if num_channels < 1:
        raise _invalid("has no channel")
    if num_channels > _MAX_CHANNELS:
        raise _invalid(f"has more than {_MAX_CHANNELS} channels")


def _check_length(num_samples: int, rate_hz: int, limits: MediaLimits) -> None:
    if num_samples > limits.max_audio_seconds * rate_hz:
        raise _invalid(f"is longer than {limits.max_audio_seconds:g} s")
    if num_samples > limits.max_audio_samples:
        raise _invalid(f"has more than {limits.max_audio_samples} samples at its rate of {rate_hz} Hz")


def _mono(block: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Averages the channels of `block` [num_samples, num_channels], clipped to [-1, 1], to [num_samples]."""
    if not np.isfinite(block).all():
        raise _invalid("has samples that are not finite numbers")
    mono: npt.NDArray[np.float32] = np.clip(block, -1.0, 1.0).mean(axis=1, dtype=np.float32)
    return mono


def _invalid(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"The audio {what}.", code="invalid_audio")


def _damaged() -> InvalidRequestError:
    return _invalid("is damaged or in a format that this server cannot read")
