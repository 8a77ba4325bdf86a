"""Files of the engines' processes outside of the checkpoint: sockets, temporary files, caches, shared memory.

vLLM makes its sockets in the folder for temporary files and never removes them: each start leaves about
eight, each restart of a stage two or three, and a killed engine leaves its rendezvous file as well. Here they
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
"""Bytes: `sun_path` of unix(7) without its end."""
_SOCKET_NAME = 1 + 36
"""Bytes: a slash and a UUID."""

_PROBE_BYTES = 64 * 1024
"""More than any one file holds that vLLM writes at the start, except for compiled code."""

_CACHE_WRITERS = {
    "vllm.model_executor.model_loader.weight_utils": "Error during atomic write.",
    "vllm.model_executor.models.registry": "Error saving model info cache.",
}
"""Loggers of vLLM that report a file of its cache as not written, with the reason as the exception, and how
these messages begin. They report other things, too."""
_COMPILE_CACHE = "torch_compile_cache"
"""vLLM's name for the part of its cache with compiled code (`vllm.compilation.backends`)."""

_RENDEZVOUS = re.compile(r"vllm_dist_[0-9a-f]{32}")
"""vLLM's name for the file by which the ranks of an engine find each other, and the beginning of the names of
what they share in memory on a CPU."""

_SHARED_KINDS = (("sem.mp-", "semaphore"), ("psm_", "shared_memory"), ("vllm_dist_", None))
"""Beginning of the file's name, and what the resource tracker calls the kind; None if it does not know the
kind."""
_MAPPED = re.compile(rf" (\d+) +{SHARED_MEMORY_DIR}/", re.MULTILINE)
"""A line of /proc/PID/maps: what stands before the path is the inode. The path itself is that of the file's
creation; a semaphore is renamed after it has been mapped."""


# -- vLLM's cache


def check_cache_folder(folder: Path, *, compiles: bool) -> None:
    """Check that vLLM can keep in `folder` what it wants to find again at the next start.

    An engine that only fails to write there makes anew what it needs, and vLLM logs two tracebacks per file.
    If the folder cannot be written, one warning names it and the reason instead. Torch's compiled code goes
    through the folder, so a stage that compiles needs it: raises `ConfigError` if one does (`compiles`) and
    nothing compiled is there yet.
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
    """Write a file of 64 KiB and remove it: an empty file can be made on a full disk, too. Raises
    `OSError`."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        data = bytes(_PROBE_BYTES)
        while data:
            data = data[os.write(file.fileno(), data) :]


# -- sockets and temporary files


class TempFolder:
    """Made by the constructor. Its lock tells other servers, in any pid namespace, that its owner is
    alive."""

    def __init__(self) -> None:
        """Raises `ConfigError` if the folder for temporary files cannot be written, or is too deep for
        sockets."""
        self.path, self._lock = _make_locked()

    def check_room(self) -> None:
        """To be called before an engine is built: an engine that cannot write its files says so in tracebacks
        only, without the folder's name. Raises `ConfigError` if there is no room."""
        try:
            _check_room(self.path)
        except OSError as error:
            raise ConfigError(
                f"an engine's temporary files cannot be written to {self.path.parent} ({error.strerror}): "
                "make room there, or set TMPDIR to a folder that can be written"
            ) from error

    def variables(self) -> dict[str, str]:
        """Environment of the engines. Sockets and temporary files go to this folder; code that torch has
        compiled does not, because the next start is to find it again. What the operator has set for those
        stays."""
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        own = {_SOCKETS: str(self.path), _COMPILED: default_cache_dir()}
        set_here = {name: value for name, value in own.items() if name not in os.environ}
        return {_TEMPORARY_FILES: str(self.path)} | set_here

    def announce_end(self) -> None:
        """From now on the engines end on SIGTERM. Without this vLLM would wait, and kill them."""
        with suppress(OSError):  # a full disk: they are killed
            ending_marker(self.path).touch()

    def remove(self) -> None:
        """To be called when the engines have ended. Harmless if the folder was removed before."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


def sweep_dead_folders() -> list[Path]:
    """Remove the folders of this user whose owner is gone, and what their engines shared in memory. Returns
    which folders were removed."""
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
            except FileNotFoundError:  # another server's sweep has taken it for one whose owner is gone
                continue
            if _try_lock(lock) and path.exists():
                return path, lock
            os.close(lock)  # the sweep came between the two steps
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
    """With the memory in which the ranks of its engines exchanged tensors."""
    with suppress(FileNotFoundError):
        names = [file.name for file in folder.iterdir() if _RENDEZVOUS.fullmatch(file.name)]
        for path in (path for name in names for path in SHARED_MEMORY_DIR.glob(f"{name}-*")):
            with suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode):
                    path.unlink()
    shutil.rmtree(folder, ignore_errors=True)  # an engine that is just ending may remove files, too


# -- shared memory beside our queues
#
# A killed engine leaves Python's semaphores and shared blocks, and on a CPU the memory in which the ranks of
# an engine exchange tensors. Python's resource tracker would remove the former only when the server ends,
# because all processes of a server share one; the latter would never be removed.


def shared_files_of(pids: Iterable[int]) -> frozenset[str]:
    """Names of the files of these kinds in /dev/shm that one of the processes has mapped. Raises
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
    """Remove those of the files that are still there, and make the resource tracker forget all of them."""
    for name in names:
        with suppress(FileNotFoundError):  # the engine has ended in good order
            (SHARED_MEMORY_DIR / name).unlink()
        kind = next(kind for prefix, kind in _SHARED_KINDS if name.startswith(prefix))
        if kind is not None:
            path = f"/{name.removeprefix('sem.')}"
            # The engine may have ended between making or removing it and telling; the tracker cannot forget
            # what it does not know, but may be told twice.
            resource_tracker.register(path, kind)
            resource_tracker.unregister(path, kind)
