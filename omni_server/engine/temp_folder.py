"""A folder of its own for the sockets and temporary files of a server's engines.

vLLM makes its sockets in the folder for temporary files and never removes them: each start leaves about eight, each
restart of a stage two or three, a killed engine its rendezvous file as well. Here they all are in one folder, which is
removed at the server's end, or by the next start where the server was killed. No other user of the machine can enter
it: in /tmp the umask decides who may connect, and whoever can speaks for an engine.
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from omni_server.engine.disk_room import write_something
from omni_server.errors import ConfigError
from omni_server.protocol.ending import ending_marker
from omni_server.transport.slab_queue import SHARED_MEMORY_DIR

PREFIX = "omni-engines-"
_SOCKETS = "VLLM_RPC_BASE_PATH"
_TEMPORARY_FILES = "TMPDIR"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"

_MAX_SOCKET_PATH = 107
"""Bytes: `sun_path` of unix(7) without its end."""
_SOCKET_NAME = 1 + 36
"""Bytes: a slash and a UUID."""

_RENDEZVOUS = re.compile(r"vllm_dist_[0-9a-f]{32}")
"""vLLM's name for the file by which the ranks of an engine find each other, and the beginning of the names of what
they share in memory on a CPU."""


class TempFolder:
    """Made by the constructor; its lock tells others that its owner lives, in any pid namespace."""

    def __init__(self) -> None:
        """Raises `ConfigError` if the folder for temporary files cannot be written, or is too deep for sockets."""
        self.path, self._lock = _make_locked()

    def check_room(self) -> None:
        """Before an engine is built: one that cannot write its files says so in tracebacks only, without the folder's
        name. Raises `ConfigError` if there is none."""
        try:
            write_something(self.path)
        except OSError as error:
            raise ConfigError(
                f"an engine's temporary files cannot be written to {self.path.parent} ({error.strerror}): make room "
                "there, or set TMPDIR to a folder that can be written"
            ) from error

    def variables(self) -> Mapping[str, str]:
        """Environment of the engines: sockets and temporary files go to this folder, but not what the next start is to
        find again, the code that torch has compiled. What the operator has set for those stays."""
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        own = {_SOCKETS: str(self.path), _COMPILED: default_cache_dir()}
        return {_TEMPORARY_FILES: str(self.path)} | {n: value for n, value in own.items() if n not in os.environ}

    def announce_end(self) -> None:
        """From now on the engines end on SIGTERM. Without it vLLM would wait, and kill them."""
        with suppress(OSError):  # a full disk: they are killed
            ending_marker(self.path).touch()

    def remove(self) -> None:
        """The engines have ended. Harmless when it was removed before."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


def sweep_dead_folders() -> list[Path]:
    """Remove the folders of this user whose owner is gone, and what their engines shared in memory. Returns which."""
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
            if _is_locked_now(lock) and path.exists():
                return path, lock
            os.close(lock)  # the sweep was there between the two steps
    except OSError as error:
        raise ConfigError(
            f"no folder for the engines' sockets can be made in {parent} ({error.strerror}): make room there, or set "
            "TMPDIR to a folder that can be written"
        ) from error


def _is_locked_now(folder: int) -> bool:
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
        if os.fstat(folder).st_uid != os.geteuid() or not _is_locked_now(folder):
            return False
        _remove(path)
        return True
    finally:
        os.close(folder)


def _remove(folder: Path) -> None:
    with suppress(FileNotFoundError):
        for file in folder.iterdir():
            if _RENDEZVOUS.fullmatch(file.name):
                _remove_shared(file.name)
    shutil.rmtree(folder, ignore_errors=True)  # an engine that is just ending may remove files, too


def _remove_shared(beginning: str) -> None:
    for path in SHARED_MEMORY_DIR.glob(f"{beginning}-*"):
        with suppress(OSError):
            if stat.S_ISREG(path.lstat().st_mode):
                path.unlink()
