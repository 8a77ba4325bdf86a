"""Files of the engines' processes other than the checkpoint: sockets, temporary files, caches, shared memory.

vLLM creates its sockets in the folder for temporary files and never removes them: each start leaves about
eight, each restart of a stage two or three, and a killed engine also leaves its rendezvous file. Here they
are all in one folder (`TempFolder`), which is removed when the server ends, or by the next start if the
server was killed. No other user of the machine can enter it: in /tmp the umask decides who may connect, and
any process that can connect can act as an engine.
"""

import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

from omni_server.errors import ConfigError
from omni_server.protocol.parent_watch import ending_marker
from omni_server.transport.slab_queue import SHARED_MEMORY_DIR

logger = logging.getLogger(__name__)

PREFIX = "omni-engines-"
_SOCKETS = "VLLM_RPC_BASE_PATH"
_TEMPORARY_FILES = "TMPDIR"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"

_MAX_SOCKET_PATH = 107
"""Bytes: `sun_path` of unix(7) without its terminator."""
_SOCKET_NAME = 1 + 36
"""Bytes: a slash and a UUID."""

ENGINE_DESCRIPTORS = 64
"""File descriptors that must be free when an engine is started: more than this process needs for it."""

_PROBE_BYTES = 64 * 1024
"""More than vLLM writes to any one file at startup, except for compiled code."""

_CACHE_WRITERS = {
    "vllm.model_executor.model_loader.weight_utils": "Error during atomic write.",
    "vllm.model_executor.models.registry": "Error saving model info cache.",
}
"""vLLM's loggers that report a cache file as not written, with the reason as the exception, and how these
messages begin. They also report other things."""
_COMPILE_CACHE = "torch_compile_cache"
"""vLLM's name for the part of its cache with compiled code (`vllm.compilation.backends`)."""

_RENDEZVOUS = re.compile(r"vllm_dist_[0-9a-f]{32}")
"""vLLM's name for the file through which the ranks of an engine find each other, and the prefix of the names
of their shared memory on a CPU."""

_SHARED_KINDS = (("sem.mp-", "semaphore"), ("psm_", "shared_memory"), ("vllm_dist_", None))
"""Prefix of the file's name, and the resource tracker's name for the kind; None if it does not know the
kind."""
_MAPPED = re.compile(rf" (\d+) +{SHARED_MEMORY_DIR}/", re.MULTILINE)
"""A line of /proc/PID/maps: the number before the path is the inode. The path is that of the file's creation;
a semaphore is renamed after it has been mapped."""


# -- vLLM's cache


def check_cache_folder(folder: Path, *, compiles: bool) -> None:
    """Checks that vLLM can keep in `folder` what it reuses at the next start.

    An engine that merely cannot write there recreates what it needs, and vLLM logs two tracebacks per file.
    If the folder is not writable, one warning gives the folder and the reason instead. Torch's compiled code
    goes through the folder, so a stage that compiles needs it: raises `ConfigError` if one does (`compiles`)
    and nothing compiled is there yet.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(folder)
    except OSError as error:
        problem = f"vLLM's cache {folder} cannot be written ({error.strerror})"
        remedy = "make room there, or set VLLM_CACHE_ROOT to a folder that can be written"
        if compiles and not (folder / _COMPILE_CACHE).is_dir():
            raise ConfigError(f"{problem}, and the stages that are compiled need it: {remedy}") from error
        logger.warning("%s: what it would keep there is made anew at each start; %s", problem, remedy)
        for name in _CACHE_WRITERS:
            logging.getLogger(name).addFilter(_is_no_cache_error)


def _is_no_cache_error(record: logging.LogRecord) -> bool:
    if record.exc_info is None or not isinstance(record.exc_info[1], OSError):
        return True
    return not str(record.msg).startswith(_CACHE_WRITERS[record.name])


def _check_room(folder: Path) -> None:
    """Writes a file of 64 KiB and removes it: an empty file can be created even on a full disk. Raises
    `OSError`."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        data = bytes(_PROBE_BYTES)
        while data:
            data = data[os.write(file.fileno(), data) :]


# -- sockets and temporary files


def check_descriptors() -> None:
    """Raises `ConfigError` unless file descriptors for an engine's sockets are free. libzmq ends the process
    if it gets none."""
    taken: list[int] = []
    try:
        for _ in range(ENGINE_DESCRIPTORS):
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise ConfigError(
            f"fewer than {ENGINE_DESCRIPTORS} file descriptors are free for an engine ({error.strerror}): raise "
            "the limit (ulimit -n)"
        ) from error
    finally:
        for descriptor in taken:
            os.close(descriptor)


class TempFolder:
    """Created by the constructor. Its lock shows other servers, in any pid namespace, that its owner is
    alive."""

    def __init__(self) -> None:
        """Raises `ConfigError` if the folder for temporary files is not writable, or its path is too long for
        sockets."""
        self.path, self._lock = _make_locked()

    def check_room(self) -> None:
        """Raises `ConfigError` if there is no room. Must be called before an engine is built: an engine that
        cannot write its files reports that only in tracebacks, without the folder's name."""
        try:
            _check_room(self.path)
        except OSError as error:
            raise ConfigError(
                f"an engine's temporary files cannot be written to {self.path.parent} ({error.strerror}): "
                "make room there, or set TMPDIR to a folder that can be written"
            ) from error

    def variables(self) -> dict[str, str]:
        """Returns the environment of the engines. Sockets and temporary files go to this folder. Code
        compiled by torch does not, because the next start reuses it. The operator's settings for sockets and
        compiled code are kept."""
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        own = {_SOCKETS: str(self.path), _COMPILED: default_cache_dir()}
        set_here = {name: value for name, value in own.items() if name not in os.environ}
        return {_TEMPORARY_FILES: str(self.path)} | set_here

    def announce_end(self) -> None:
        """Makes the engines end on SIGTERM from now on. Without this vLLM would wait, and kill them."""
        with suppress(OSError):  # a full disk: the engines are killed
            ending_marker(self.path).touch()

    def remove(self) -> None:
        """Must be called after the engines have ended. Harmless if the folder has already been removed."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


def sweep_dead_folders() -> list[Path]:
    """Removes this user's folders whose owner is gone, and the shared memory of their engines. Returns the
    removed folders."""
    return [path for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*") if _remove_if_dead(path)]


def _make_locked() -> tuple[Path, int | None]:
    parent = "the folder for temporary files"
    try:
        parent = tempfile.gettempdir()
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            if len(os.fsencode(path)) + _SOCKET_NAME > _MAX_SOCKET_PATH:
                path.rmdir()
                raise ConfigError(f"{parent}: this path is too long for sockets: set TMPDIR to a shorter one")
            try:
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:  # another server's sweep took its owner for dead
                continue
            if _try_lock(lock) and path.exists():
                return path, lock
            os.close(lock)  # the sweep ran between the two steps
    except OSError as error:
        raise ConfigError(
            f"no folder for the engines' sockets can be made in {parent} ({error.strerror}): "
            "make room there, or set TMPDIR to a folder that can be written"
        ) from error


def _try_lock(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_if_dead(path: Path) -> bool:
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # just removed by its owner, or another user's
        return False
    try:
        if os.fstat(folder).st_uid != os.geteuid() or not _try_lock(folder):
            return False
        _remove(path)
        return True
    finally:
        os.close(folder)


def _remove(folder: Path) -> None:
    """Removes the folder and the memory in which the ranks of its engines exchanged tensors."""
    with suppress(FileNotFoundError):
        names = [file.name for file in folder.iterdir() if _RENDEZVOUS.fullmatch(file.name)]
        for path in (path for name in names for path in SHARED_MEMORY_DIR.glob(f"{name}-*")):
            with suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode):
                    path.unlink()
    shutil.rmtree(folder, ignore_errors=True)  # an engine that is just ending may remove files, too


# -- shared memory other than our queues
#
# A killed engine leaves Python's semaphores and shared blocks, and on a CPU the memory in which the ranks of
# an engine exchange tensors. Python's resource tracker would remove the former only when the server ends,
# because all processes of a server share one tracker. The latter would never be removed.


def shared_files_of(pids: Iterable[int]) -> frozenset[str]:
    """Returns the names of the files of these kinds in /dev/shm that any of the processes has mapped. Raises
    `OSError`."""
    inodes: set[int] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            inodes.update(map(int, _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text())))
    prefixes = tuple(prefix for prefix, _ in _SHARED_KINDS)
    return frozenset(
        entry.name
        for entry in os.scandir(SHARED_MEMORY_DIR)
        if entry.name.startswith(prefixes) and entry.inode() in inodes
    )


def remove_shared_files(names: Iterable[str]) -> None:
    """Removes the files that still exist, and makes the resource tracker forget all of them."""
    for name in names:
        with suppress(FileNotFoundError):  # the engine has ended gracefully
            (SHARED_MEMORY_DIR / name).unlink()
        kind = next(kind for prefix, kind in _SHARED_KINDS if name.startswith(prefix))
        if kind is not None:
            path = f"/{name.removeprefix('sem.')}"
            # The engine may have ended between creating or removing the file and reporting it. The tracker
            # cannot forget an unknown file, but accepts one twice.
            resource_tracker.register(path, kind)
            resource_tracker.unregister(path, kind)
