"""Decodes audio files to mono waveforms of one rate: WAV files of PCM here, others in a separate process."""

import io
import math
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from omni_server.errors import InvalidRequestError
from omni_server.media.demuxer import demuxer_of
from omni_server.media.limited_process import Cancellation, Output, Reader, read_in_process
from omni_server.media.limits import MediaLimits
from omni_server.types import SAMPLE_RATE_HZ, AudioPart

DECODED_RATE_HZ = 16_000
"""Of the audio encoders of all models that listen."""
_MIN_FILE_RATE_HZ = 4_000
_MAX_FILE_RATE_HZ = 192_000
_MAX_CHANNELS = 8
_SAMPLE_BYTES = 4
_BLOCK_SAMPLES = 1 << 16
_PCM = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
"""libsndfile's names of encodings with a code for each sample, which it decodes within milliseconds."""

_MODULE = Path(__file__).with_name("read_audio_track.py")
_HEADER = struct.Struct("=IIQ")
_DAMAGED, _NO_AUDIO, _EMPTY = 3, 4, 5
"""As in the module: importing it would load FFmpeg."""
_MAX_MEMORY_BYTES = 512 * 1024 * 1024
"""Address space of the process. Python, FFmpeg and a decoder use 150 MiB of it."""


def decode_audio(
    data: bytes,
    limits: MediaLimits,
    declared_format: str | None = None,
    cancellation: Cancellation | None = None,
    rate_hz: int = DECODED_RATE_HZ,
) -> AudioPart:
    """Returns the waveform at `rate_hz`. The file's channels are clipped to [-1, 1] and averaged.

    Resamples with soxr's HQ filters, as librosa does, with which Qwen's utilities load files. Accepts WAV,
    FLAC, Ogg (Opus, Vorbis, FLAC), MP3, AAC (ADTS), WebM and Matroska, MP4 (M4A, QuickTime) and AVI, detected
    from the bytes, and uses the first audio track. `declared_format` matters only if it is "pcm16" or "pcm"
    and the bytes have no file header: then they are int16, little-endian, mono, 24 kHz.

    Raises `InvalidRequestError` with code `invalid_audio`, and `OmniError` if the decoder cannot be run.
    """
    with _open(data, declared_format, limits, cancellation or Cancellation()) as (rate, _, blocks):
        samples = bytearray()
        for block in _resampled(rate, blocks, rate_hz):
            samples += block.data
            _check_length(len(samples) // _SAMPLE_BYTES, limits, rate_hz)
    if len(samples) < limits.min_audio_seconds * rate_hz * _SAMPLE_BYTES:
        raise _too_short(limits)
    return AudioPart(np.frombuffer(samples, dtype=np.float32), rate_hz)


def decode_audio_track(
    data: bytes, limits: MediaLimits, cancellation: Cancellation | None = None
) -> AudioPart | None:
    """As `decode_audio`, of a video; returns None without an audio track or with an empty one."""
    try:
        return decode_audio(data, limits, None, cancellation)
    except _NoAudioTrackError:
        return None


def count_samples(data: bytes, limits: MediaLimits, cancellation: Cancellation | None = None) -> int:
    """Counts the samples that `decode_audio` would return, without keeping them. Uses the header alone if it
    declares them: a damaged file may have fewer.

    Raises `InvalidRequestError` as `decode_audio` does, for faults that the header shows.
    """
    with _open(data, None, limits, cancellation or Cancellation()) as (rate, declared, blocks):
        if declared:
            return math.ceil(declared * DECODED_RATE_HZ / rate)
        num_samples = 0
        for block in _resampled(rate, blocks):
            num_samples += len(block)
            _check_length(num_samples, limits)
        return num_samples


class _NoAudioTrackError(InvalidRequestError):
    """The file may be a video."""


_Blocks = Iterable[npt.NDArray[np.float32]]
"""Each [num_samples, num_channels]."""


def _resampled(
    file_rate_hz: int, blocks: _Blocks, rate_hz: int = DECODED_RATE_HZ
) -> Iterator[npt.NDArray[np.float32]]:
    """Yields mono samples [num_samples] at `rate_hz`."""
    resampler = soxr.ResampleStream(file_rate_hz, rate_hz, num_channels=1)
    for block in blocks:
        yield resampler.resample_chunk(_mono(block))
    yield resampler.resample_chunk(np.zeros(0, dtype=np.float32), last=True)


@contextmanager
def _open(
    data: bytes, declared_format: str | None, limits: MediaLimits, cancellation: Cancellation
) -> Iterator[tuple[int, int, _Blocks]]:
    """Yields the rate in Hz, the number of samples that the header declares, 0 if none, and the samples.

    Raises `InvalidRequestError`, also inside the block, unless it is an audio file within the limits.
    """
    if len(data) > limits.max_bytes:
        raise _invalid(f"is larger than the {limits.max_bytes} bytes allowed")
    demuxer = demuxer_of(data)
    # MPEG frames begin like the sample -1, which is too little to override what the client says.
    if declared_format in ("pcm16", "pcm") and (demuxer is None or data[0] == 0xFF):
        samples = _decode_pcm16(data)
        yield SAMPLE_RATE_HZ, len(samples), [samples[:, None]]
    elif demuxer is None:
        raise _invalid(
            "is not in a known format "
            "(wav, mp3, flac, ogg, aac, webm, mp4; headerless pcm16 must be declared as such)"
        )
    elif demuxer == "wav" and (file := _open_pcm(data)) is not None:
        _check_rate_and_channels(file.samplerate, file.channels)
        _check_length(file.frames * DECODED_RATE_HZ // file.samplerate, limits)
        try:
            with file:
                blocks = file.blocks(_BLOCK_SAMPLES, dtype="float32", always_2d=True)
                yield file.samplerate, int(file.frames), blocks
        except soundfile.SoundFileError as error:
            raise _damaged() from error
    else:
        with read_in_process(_reader(demuxer, limits), data, cancellation) as output:
            rate, num_channels, num_samples = _HEADER.unpack(output.read(_HEADER.size))
            _check_rate_and_channels(rate, num_channels)
            _check_length(num_samples * DECODED_RATE_HZ // rate, limits)
            yield rate, num_samples, _blocks(output, num_channels)


def _open_pcm(data: bytes) -> soundfile.SoundFile | None:
    """Returns None if the process has to read the file: another encoding, or a header without the length, as
    a recorder that was killed leaves it."""
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.SoundFileError:
        return None
    return file if file.subtype in _PCM and file.frames else None


def _decode_pcm16(data: bytes) -> npt.NDArray[np.float32]:
    if len(data) % 2:
        raise _invalid("is declared as pcm16 and has an odd number of bytes")
    return np.frombuffer(data, dtype="<i2").astype(np.float32) / np.float32(32768.0)


def _reader(demuxer: str, limits: MediaLimits) -> Reader:
    return Reader(
        module=_MODULE,
        arguments=[demuxer],
        reads="the audio track",
        max_memory_bytes=_MAX_MEMORY_BYTES,
        max_cpu_s=int(limits.decode_timeout_s) + 1,
        timeout_s=limits.decode_timeout_s,
        refusals={
            _DAMAGED: _damaged(),
            _NO_AUDIO: _NoAudioTrackError("The file has no audio track.", code="invalid_audio"),
            # Of a container, the samples may have been cut off.
            _EMPTY: _NoAudioTrackError(
                (_too_short(limits) if demuxer == "wav" else _damaged()).message, code="invalid_audio"
            ),
        },
        too_slow=_invalid(f"could not be decoded within {limits.decode_timeout_s:g} s"),
    )


def _blocks(output: Output, num_channels: int) -> Iterator[npt.NDArray[np.float32]]:
    frame_bytes = num_channels * _SAMPLE_BYTES
    rest = b""
    for chunk in output.chunks():
        data = rest + chunk
        end = len(data) - len(data) % frame_bytes
        rest = data[end:]
        yield np.frombuffer(data[:end], dtype=np.float32).reshape(-1, num_channels)


def _check_rate_and_channels(rate_hz: int, num_channels: int) -> None:
    if not _MIN_FILE_RATE_HZ <= rate_hz <= _MAX_FILE_RATE_HZ:
        raise _invalid(f"has a sample rate outside {_MIN_FILE_RATE_HZ} to {_MAX_FILE_RATE_HZ} Hz")
    if num_channels < 1:
        raise _invalid("has no channel")
    if num_channels > _MAX_CHANNELS:
        raise _invalid(f"has more than {_MAX_CHANNELS} channels")


def _check_length(num_samples: int, limits: MediaLimits, rate_hz: int = DECODED_RATE_HZ) -> None:
    if num_samples > limits.max_audio_seconds * rate_hz:
        raise _invalid(f"is longer than {limits.max_audio_seconds:g} s")


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


def _too_short(limits: MediaLimits) -> InvalidRequestError:
    return _invalid(f"is shorter than {limits.min_audio_seconds:g} s")
