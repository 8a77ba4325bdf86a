"""A bounded queue of slabs in shared memory, for one edge and one replica of its producer.

One slot holds what one step of the producer sends to all its requests; the part of one request is a
*portion*. Who may do what:

* the producer's scheduler takes slots (`take`), one per step, and is the only one that does;
* the producer's worker fills a slot and announces its number of portions (`publish`);
* the owner of a message that refers to a portion ends it exactly once: the consumer's workers after copying
  (`finish` for their rank), or the process that drops the message (`finish_all`). A slot is free again when
  all of its portions have ended. The server ends what a dead process owned (`BlockLedger`).

Every flag has one writer at a time, because ownership moves with the message; no lock is needed.

Rows and references need no further care: a message is read after everything its sender wrote before it. But
the flags that free a slot are polled, without a message. They rely on the order in which x86-64 shows one
core's loads and stores to the others: a portion's end is not seen before its rows have been read, nor a
generation before its number of portions. Other processors (Arm's, Nvidia's Grace) may reorder these, and
Python has no fence and no atomic variable that processes could share. Its locks are ordered, but a process
that is killed or stopped while it holds one stops all the others. Queues are therefore not created on other
machines (`refuse_unordered_machine`); edges with `transport: inline` work anywhere.

The producer's processes and those of all replicas of the consumer map the file. Its creator holds an flock on
it for as long as it lives, so that a later start can tell a dead owner's file from a living one's, in any pid
namespace.
"""

import fcntl
import mmap
import os
import platform
import secrets
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omni_server.errors import ConfigError
from omni_server.protocol.rows import SharedBlock
from omni_server.protocol.runtime_config import QueueSpec

SHARED_MEMORY_DIR = Path("/dev/shm")
NAME_PREFIX = "omni-server-"
_ALIGNMENT = 4096
_ORDERED_MACHINE = "x86_64"
"""`platform.machine()` of the machines whose order of stores is what the module needs."""


def refuse_unordered_machine() -> None:
    """Raises `ConfigError` unless this machine shows loads and stores in the order that the queue needs."""
    if (machine := platform.machine()) != _ORDERED_MACHINE:
        raise ConfigError(
            "queues in shared memory need the order in which x86-64 makes stores visible, and this machine "
            f"is {machine}: set queue.transport to inline"
        )


class SlabQueue:
    """One mapping of the queue's file. All processes of an edge see the same slots."""

    def __init__(self, spec: QueueSpec, *, create: bool = False) -> None:
        """Maps the file at `spec.path`; with `create`, creates it first and owns it.

        Raises `ConfigError` if there is not enough shared memory, and on machines other than x86-64.
        """
        if create:
            refuse_unordered_machine()
        assert spec.path is not None
        self.path = Path(spec.path)
        self.number = spec.number
        self.capacity = capacity = spec.capacity
        self.slot_bytes = _aligned(spec.slot_bytes)
        self.max_portions = spec.max_portions
        header_words = _header_words(spec)
        self._data_offset = _aligned(header_words * 4)
        self._owner_fd = _create(self.path, queue_bytes(spec)) if create else None
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, queue_bytes(spec))
        finally:
            os.close(fd)
        words = np.frombuffer(self._map, np.uint32, header_words)
        # Generation that the worker has published, and its number of portions.
        self._published: npt.NDArray[np.uint32] = words[:capacity]
        self._num_portions: npt.NDArray[np.uint32] = words[capacity : 2 * capacity]
        # Generation that each rank of the consumer has ended, per portion.
        self._ended: npt.NDArray[np.uint32] = words[2 * capacity :].reshape(
            capacity, spec.max_portions, spec.num_consumers
        )
        # Generation that the scheduler has handed out; only its own process accesses it. A scheduler that
        # replaces a dead one continues where that one ended, because what was published may still be in use.
        self._taken: npt.NDArray[np.uint32] = self._published.copy()

    # -- the producer's scheduler

    def num_free(self) -> int:
        return sum(self._is_free(slot) for slot in range(self.capacity))

    def take(self) -> tuple[int, int] | None:
        """Returns a free slot and the generation of its new use, or None if all are in use."""
        for slot in range(self.capacity):
            if self._is_free(slot):
                generation = (int(self._taken[slot]) + 1) & 0xFFFFFFFF or 1  # 0 means: never used
                self._taken[slot] = generation
                return slot, generation
        return None

    def _is_free(self, slot: int) -> bool:
        generation = self._taken[slot]
        if generation == 0:
            return True
        if self._published[slot] != generation:
            return False
        num_portions = int(self._num_portions[slot])
        return bool((self._ended[slot, :num_portions] == generation).all())

    # -- the producer's worker

    def slot_buffer(self, slot: int) -> memoryview:
        start = self._data_offset + slot * self.slot_bytes
        return memoryview(self._map)[start : start + self.slot_bytes]

    def publish(self, slot: int, generation: int, num_portions: int) -> None:
        """Announces that the slot's current use has `num_portions` portions; 0 frees it immediately."""
        if num_portions > self.max_portions:
            raise ValueError(f"{num_portions} portions in a slot that has room for {self.max_portions}")
        self._num_portions[slot] = num_portions
        self._published[slot] = generation

    # -- the owner of a reference

    def check(self, block: SharedBlock) -> None:
        """Raises `ValueError` for a reference to an earlier use of its slot, or to a nonexistent portion."""
        if not (0 <= block.slot < self.capacity and 0 <= block.portion < self.max_portions):
            raise ValueError(f"there is no portion {block.portion} of slot {block.slot}")
        if self._published[block.slot] != block.generation:
            raise ValueError(f"stale reference to slot {block.slot}, generation {block.generation}")

    def finish(self, block: SharedBlock, consumer: int) -> None:
        """Ends the portion for one consumer rank, which has copied it."""
        self._ended[block.slot, block.portion, consumer] = block.generation

    def finish_all(self, block: SharedBlock) -> None:
        """Ends the portion for all ranks."""
        self._ended[block.slot, block.portion, :] = block.generation

    # -- the server, after a process has died

    def published_blocks(self) -> list[SharedBlock]:
        """Returns every portion of the current use of every slot that has been used."""
        return [
            SharedBlock(slot, generation, portion, self.number)
            for slot in range(self.capacity)
            if (generation := int(self._published[slot]))
            for portion in range(min(int(self._num_portions[slot]), self.max_portions))
        ]

    def is_open(self, block: SharedBlock) -> bool:
        """Whether the slot is still in this use and some rank has not ended the portion."""
        if self._published[block.slot] != block.generation:
            return False
        return bool((self._ended[block.slot, block.portion] != block.generation).any())

    # -- any process

    def num_in_use(self) -> int:
        """Returns the number of published slots with a portion that has not ended."""
        return sum(
            bool((self._ended[slot, : int(self._num_portions[slot])] != self._published[slot]).any())
            for slot in range(self.capacity)
        )

    def num_published(self) -> int:
        """Returns the number of steps that went through the queue since its creation."""
        return int(self._published.sum(dtype=np.int64))

    # -- lifetime

    def close(self) -> None:
        """Unmaps the file; the owner also removes it."""
        del self._published, self._num_portions, self._ended  # they hold the mapping
        with suppress(BufferError):  # a tensor still views the mapping; the kernel drops it with the process
            self._map.close()
        if self._owner_fd is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._owner_fd)
            self._owner_fd = None


def queue_bytes(spec: QueueSpec) -> int:
    """Returns the bytes of shared memory that a queue occupies, from its creation on."""
    return _aligned(_header_words(spec) * 4) + spec.capacity * _aligned(spec.slot_bytes)


def _header_words(spec: QueueSpec) -> int:
    return spec.capacity * (2 + spec.max_portions * spec.num_consumers)


def new_queue_path(name: str) -> Path:
    """Returns a new file name in shared memory; `name` shows a reader of /dev/shm which edge it is."""
    return SHARED_MEMORY_DIR / f"{NAME_PREFIX}{os.getpid()}-{name}-{secrets.token_hex(4)}"


def sweep_dead_queues() -> list[Path]:
    """Removes queue files whose owner is gone, after a kill -9 or a power cut. Returns the removed paths."""
    return [path for path in SHARED_MEMORY_DIR.glob(f"{NAME_PREFIX}*") if _remove_if_dead(path)]


def _remove_if_dead(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):  # just removed by its owner, or another user's
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # its owner is alive
    else:
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def _create(path: Path, size: int) -> int:
    """Creates and reserves the file. Returns the descriptor that holds the owner's lock.

    The file has no name until it is locked and complete: a sweep by another server never sees it unlocked,
    and a creator that dies half-way leaves nothing behind.
    """
    fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(fd, 0, size)  # a full /dev/shm fails here and not with a SIGBUS later
        _give_name(fd, path)
    except OSError as exc:
        os.close(fd)
        raise ConfigError(
            f"the queue {path.name} needs {size / 2**20:.0f} MiB in {path.parent} ({exc.strerror}): enlarge "
            "it (docker run --shm-size or --ipc=host), or lower queue.capacity or max_num_batched_tokens"
        ) from exc
    return fd


def _give_name(fd: int, path: Path) -> None:
    """Names an unnamed file (linkat(2)). Python follows the link in /proc only if given a directory."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
