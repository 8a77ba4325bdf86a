"""The demo models. One is trained and comes with the package; the others have random weights and are made on
this machine when they are first used."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from omni_server.errors import ConfigError

_MAKER = "tests.checkpoints"
"""The package and program that makes checkpoints; loaded by name, as model families are."""
_REFUSED = "make_demo_checkpoint: "
"""What it writes before its reason for refusing."""


class Demo(Protocol):
    @property
    def served_name(self) -> str:
        """What requests use as `model`."""
        ...

    def folder(self, on_progress: Callable[[str], None]) -> Path:
        """Returns the checkpoint's folder. Raises `ConfigError` if it cannot be made."""
        ...


@dataclass(frozen=True)
class ShippedDemo:
    """A trained checkpoint in the package."""

    served_name: str
    package: str
    name: str
    """The checkpoint's folder, below the package."""

    def folder(self, on_progress: Callable[[str], None]) -> Path:
        return Path(str(files(self.package))) / self.name


@dataclass(frozen=True)
class MadeDemo:
    """A checkpoint with random weights. It is made in seconds and kept in the user's cache; shipping its
    random numbers would triple the size of the package."""

    served_name: str
    family: str
    """As the maker takes it."""

    def folder(self, on_progress: Callable[[str], None]) -> Path:
        folder = _cache() / _digest_of_the_maker() / f"{self.family}_demo"
        if folder.is_dir():
            return folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refusal(folder, str(error.strerror)) from error
        on_progress(f"making the demo model {self.served_name}, with random weights, in {folder}")
        # In a process of its own: it starts threads, and engines are forked from a single-threaded process.
        command = [sys.executable, "-P", "-m", _MAKER, str(folder), "--family", self.family]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if not folder.is_dir():  # otherwise another program may have been faster; its checkpoint is the same
            lines = finished.stderr.splitlines() or [f"exit code {finished.returncode}"]
            if lines[-1].startswith(_REFUSED):
                raise ConfigError(
                    f"the demo model {self.served_name} cannot be made: {lines[-1].removeprefix(_REFUSED)}"
                )
            raise self._refusal(folder, lines[-1])
        return folder

    def _refusal(self, folder: Path, reason: str) -> ConfigError:
        return ConfigError(
            f"the demo model {self.served_name} cannot be made in {folder}: {reason}; set XDG_CACHE_HOME to a "
            "folder that can be written and has 40 MB free"
        )


DEFAULT_DEMO = "speaking"
DEMOS: Mapping[str, Demo] = {
    DEFAULT_DEMO: ShippedDemo("speaking-demo", "stages.qwen2_5_omni", "speaking_demo"),
    "qwen3_omni": MadeDemo("qwen3-omni-demo", "qwen3_omni"),
    "images": MadeDemo("images-demo", "diffusers"),
}


def _cache() -> Path:
    """As in the XDG base directory specification, which ignores relative paths."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "omni-server" / "demos"


def _digest_of_the_maker() -> str:
    """Of its source code: after an upgrade that changes it, checkpoints are made again."""
    sources = sorted(path for path in Path(str(files(_MAKER))).rglob("*") if path.suffix in (".py", ".json"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:12]
