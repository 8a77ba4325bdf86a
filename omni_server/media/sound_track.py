"""Sound tracks of WebM, Matroska, MP4, M4A and QuickTime files, read by FFmpeg in a process of its own.

A small file of these formats can unpack to gigabytes before FFmpeg hands over its first packet, keep it busy for
minutes, or meet a fault of FFmpeg's. A process has limits of memory and processor time that the system enforces, can
be ended at any moment, and takes nothing with it (`read_sound_track`). It starts in a tenth of a second; FFmpeg is
never loaded into the server itself for this.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omni_server.errors import OmniError
from omni_server.media.audio_checks import check_length, check_stream, damaged_audio, invalid_audio, mix_to_mono
from omni_server.media.limits import MediaLimits

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("read_sound_track.py")
_HEADER_BYTES = 8
_DAMAGED, _NO_SOUND = 3, 4
"""The program's exit statuses, and the size of its `HEADER`: the module itself would load FFmpeg."""

_MAX_MEMORY_BYTES = 512 * 1024 * 1024
"""Of the process's addresses. Python, FFmpeg and a decoder take 150 MiB of them; the file is not counted."""
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH")
"""What Python may need to find FFmpeg. The keys of this server are in other variables."""
_READ_BYTES = 1 << 16


def container_of(data: bytes) -> str | None:
    """FFmpeg's name for the file's format, if it is one of those that are read here."""
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    return "mov" if data[4:8] == b"ftyp" else None


def read_sound_track(data: bytes, container: str, limits: MediaLimits) -> tuple[npt.NDArray[np.float32], int]:
    """The first sound track, its channels averaged: samples [num_samples] in [-1, 1], and their rate in Hz.

    Raises `InvalidRequestError` with code `invalid_audio`, as soon as there is more sound than the limits allow.
    """
    samples = bytearray()
    with _open(data, container, limits) as (rate, blocks):
        for block in blocks:
            mono = np.empty(len(block), dtype=np.float32)
            mix_to_mono(block, mono)
            samples += mono.data
            check_length(len(samples) // mono.itemsize, rate, limits)
    return np.frombuffer(samples, dtype=np.float32), rate


def count_sound_track(data: bytes, container: str, limits: MediaLimits) -> int:
    """How many samples `read_sound_track` gives. They are decoded for that: what a recording of a browser says of its
    length is 0 or nothing, and what a stranger says need not be true. Raises as that does."""
    num_samples = 0
    with _open(data, container, limits) as (rate, blocks):
        for block in blocks:
            num_samples += len(block)
            check_length(num_samples, rate, limits)
    return num_samples


@contextmanager
def _open(data: bytes, container: str, limits: MediaLimits) -> Iterator[tuple[int, Iterator[npt.NDArray[np.float32]]]]:
    """The rate, and blocks [num_samples, num_channels]."""
    deadline = time.monotonic() + limits.decode_timeout_s
    program = [sys.executable, "-P", str(_PROGRAM), container, str(_MAX_MEMORY_BYTES)]
    program.append(str(int(limits.decode_timeout_s) + 1))
    file = os.memfd_create("sound")
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(data)
        os.lseek(file, 0, os.SEEK_SET)
        process = subprocess.Popen(
            program,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
    finally:
        os.close(file)
    with process:
        try:
            output = _Output(process, deadline, limits)
            header = output.read(_HEADER_BYTES)
            rate, num_channels = (int(value) for value in np.frombuffer(header, dtype=np.uint32))
            check_stream(rate, num_channels)
            yield rate, output.blocks(num_channels)
        finally:
            process.kill()


class _Output:
    """What the process writes, up to the deadline."""

    def __init__(self, process: subprocess.Popen[bytes], deadline: float, limits: MediaLimits) -> None:
        assert process.stdout is not None
        self._process = process
        self._pipe = process.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)
        self._deadline = deadline
        self._limits = limits

    def read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            chunk = self._read_some(num_bytes - len(data))
            if not chunk:
                self._check_end()
                raise damaged_audio()
            data += chunk
        return data

    def blocks(self, num_channels: int) -> Iterator[npt.NDArray[np.float32]]:
        frame_bytes = num_channels * np.dtype(np.float32).itemsize
        rest = b""
        while chunk := self._read_some(_READ_BYTES):
            data = rest + chunk
            end = len(data) - len(data) % frame_bytes
            rest = data[end:]
            yield np.frombuffer(data[:end], dtype=np.float32).reshape(-1, num_channels)
        self._check_end()

    def _read_some(self, max_bytes: int) -> bytes:
        """Nothing at the end."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0 or not self._poll.poll(left_s * 1000):
            raise self._too_slow()
        return os.read(self._pipe, max_bytes)

    def _check_end(self) -> None:
        """After the last byte. Raises what the end of the process means."""
        try:
            status = self._process.wait(max(self._deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            raise self._too_slow() from None
        if status == 0:
            return
        if status == _NO_SOUND:
            raise invalid_audio("has no sound track")
        if status == _DAMAGED:
            raise damaged_audio()
        if status == -signal.SIGXCPU:
            raise self._too_slow()
        if status < 0:
            logger.warning("FFmpeg was ended by signal %d while it read a sound track", -status)
            raise damaged_audio()
        assert self._process.stderr is not None
        logger.error("The reader of sound tracks failed: %s", self._process.stderr.read().decode(errors="replace"))
        raise OmniError("The server could not read the sound track.")

    def _too_slow(self) -> OmniError:
        return invalid_audio(f"could not be decoded within {self._limits.decode_timeout_s:g} s")
