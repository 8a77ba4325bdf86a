"""Sound tracks of WebM, Matroska, MP4, M4A and QuickTime files, read by FFmpeg in a process of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omni_server.media.audio_checks import check_length, check_stream, damaged_audio, invalid_audio, mix_to_mono
from omni_server.media.limited_process import Cancellation, Output, Reader, read_in_process
from omni_server.media.limits import MediaLimits

_MODULE = Path(__file__).with_name("read_sound_track.py")
_HEADER_BYTES = 8
_DAMAGED, _NO_SOUND = 3, 4
"""The module's exit statuses, and the size of its `HEADER`: to import it would load FFmpeg."""

_MAX_MEMORY_BYTES = 512 * 1024 * 1024
"""Of the process's addresses. Python, FFmpeg and a decoder take 150 MiB of them."""


def container_of(data: bytes) -> str | None:
    """FFmpeg's name for the file's format, if it is one of those that are read here."""
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    return "mov" if data[4:8] == b"ftyp" else None


def read_sound_track(
    data: bytes, container: str, limits: MediaLimits, cancellation: Cancellation
) -> tuple[npt.NDArray[np.float32], int]:
    """The first sound track, its channels averaged: samples [num_samples] in [-1, 1], and their rate in Hz.

    Raises `InvalidRequestError` with code `invalid_audio`, as soon as there is more sound than the limits allow.
    """
    samples = bytearray()
    with _open(data, container, limits, cancellation) as (rate, blocks):
        for block in blocks:
            mono = np.empty(len(block), dtype=np.float32)
            mix_to_mono(block, mono)
            samples += mono.data
            check_length(len(samples) // mono.itemsize, rate, limits)
    return np.frombuffer(samples, dtype=np.float32), rate


def count_sound_track(data: bytes, container: str, limits: MediaLimits, cancellation: Cancellation) -> int:
    """How many samples `read_sound_track` gives. They are decoded for that: what a recording of a browser says of its
    length is 0 or nothing, and what a stranger says need not be true. Raises as that does."""
    num_samples = 0
    with _open(data, container, limits, cancellation) as (rate, blocks):
        for block in blocks:
            num_samples += len(block)
            check_length(num_samples, rate, limits)
    return num_samples


@contextmanager
def _open(
    data: bytes, container: str, limits: MediaLimits, cancellation: Cancellation
) -> Iterator[tuple[int, Iterator[npt.NDArray[np.float32]]]]:
    """The rate, and blocks [num_samples, num_channels]."""
    reader = Reader(
        module=_MODULE,
        arguments=[container],
        reads="the sound track",
        environment={},
        max_memory_bytes=_MAX_MEMORY_BYTES,
        max_cpu_s=int(limits.decode_timeout_s) + 1,
        timeout_s=limits.decode_timeout_s,
        refusals={_DAMAGED: damaged_audio(), _NO_SOUND: invalid_audio("has no sound track")},
        too_slow=invalid_audio(f"could not be decoded within {limits.decode_timeout_s:g} s"),
    )
    with read_in_process(reader, data, cancellation) as output:
        header = output.read(_HEADER_BYTES)
        rate, num_channels = (int(value) for value in np.frombuffer(header, dtype=np.uint32))
        check_stream(rate, num_channels)
        yield rate, _blocks(output, num_channels)


def _blocks(output: Output, num_channels: int) -> Iterator[npt.NDArray[np.float32]]:
    frame_bytes = num_channels * np.dtype(np.float32).itemsize
    rest = b""
    for chunk in output.chunks():
        data = rest + chunk
        end = len(data) - len(data) % frame_bytes
        rest = data[end:]
        yield np.frombuffer(data[:end], dtype=np.float32).reshape(-1, num_channels)
