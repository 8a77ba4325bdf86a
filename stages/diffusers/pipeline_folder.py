"""Reads a folder of a Diffusers pipeline, and refuses what must not be loaded.

Nothing in a folder is executed: only classes of diffusers and transformers are used, and only weights in the
safetensors format.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from omni_server.config.checkpoint_files import indexed_weight_files, read_json_object
from omni_server.errors import ConfigError

INDEX = "model_index.json"
CONFIG_FORMAT = "diffusers"
"""vLLM's name for the format of such a folder (`stages.diffusers.vllm_model`)."""
LIBRARIES = frozenset({"diffusers", "transformers"})
PICKLED = frozenset({".bin", ".ckpt", ".pkl", ".pt", ".pth"})
SAFE = ".safetensors"
HALF_VARIANT = "fp16"
"""The only variant that is loaded where a folder has no other weights."""


@dataclass(frozen=True)
class PipelineFolder:
    path: Path
    class_name: str
    """Of the pipeline, in diffusers."""
    components: Mapping[str, tuple[str, str]]
    """Library and class by name, without those that the pipeline goes without."""
    variant: str | None
    """Of the weights' files; None for the usual names."""

    def config_of(self, component: str) -> Mapping[str, object]:
        """The component's config.json; empty if it has none."""
        path = self.path / component / "config.json"
        return read_json_object(path) if path.is_file() else {}

    def weight_files(self) -> Iterator[Path]:
        """The safetensors files that are loaded."""
        for name in self.components:
            yield from _weights(self.path / name, self.variant)

    @property
    def has_weights(self) -> bool:
        """False for a folder with the small files only, which can be served with random weights."""
        return any(True for _ in self.weight_files())


def read_pipeline_folder(path: Path) -> PipelineFolder:
    """Raises `ConfigError` for a folder that is incomplete, has pickled weights only, or needs code that is
    not in diffusers or transformers. A folder may have no weights at all."""
    index = read_json_object(path / INDEX)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str):
        raise ConfigError(
            f"{path / INDEX}: _class_name is {json.dumps(class_name)}; custom pipelines, whose code is in the "
            "folder, are not run"
        )
    components: dict[str, tuple[str, str]] = {}
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list):
            continue
        if value == [None, None]:
            continue
        if len(value) != 2 or not all(isinstance(part, str) for part in value):
            raise ConfigError(f"{path / INDEX}: {name} is {json.dumps(value)}, not a library and a class")
        library, cls = value
        if library not in LIBRARIES and not _is_part_of_diffusers(library):
            raise ConfigError(
                f"{path / INDEX}: {name} is the class {cls} of {library}; only classes of "
                f"{' and '.join(sorted(LIBRARIES))} are run, no code from the folder"
            )
        if Path(name).name != name:
            raise ConfigError(f"{path / INDEX}: {name!r} is no name of a component")
        components[name] = library, cls
    has_weights = any(True for _ in path.glob(f"*/*{SAFE}"))
    variant = None
    for name in components:
        found = _check_component(path / name, has_weights=has_weights)
        variant = variant or found
    return PipelineFolder(path, class_name, components, variant)


def component_class(folder: PipelineFolder, name: str) -> Any:
    """Raises `ConfigError` if the library has no such class."""
    library, class_name = folder.components[name]
    package = library if library in LIBRARIES else f"diffusers.pipelines.{library}"
    cls = getattr(import_module(package), class_name, None)
    if not (isinstance(cls, type) and hasattr(cls, "from_pretrained")):
        raise ConfigError(
            f"{folder.path / INDEX}: {name} is {class_name} of {library}, which is no class that can be loaded"
        )
    return cls


def _is_part_of_diffusers(library: str) -> bool:
    """Some components are in the package of their pipeline, such as `stable_diffusion`'s safety checker."""
    from importlib.util import find_spec

    return library.isidentifier() and find_spec(f"diffusers.pipelines.{library}") is not None


def _check_component(folder: Path, *, has_weights: bool) -> str | None:
    """Returns the variant of its weights. A component without config.json has no weights, and none has if the
    pipeline has none."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is missing, which {folder.parent / INDEX} names: download it too")
    for config in sorted(folder.glob("*config.json")):
        if "auto_map" in read_json_object(config):
            raise ConfigError(f"{config} refers to code in the folder (auto_map), which is not run")
    if not (folder / "config.json").is_file():
        return None
    for index in folder.glob(f"*{SAFE}.index*.json") if has_weights else ():
        files = indexed_weight_files(index)
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ConfigError(
                f"{folder}: {len(missing)} of its {len(files)} weight files are missing, the first is "
                f"{missing[0]}: download the model again"
            )
    if _weights(folder, None):
        return None
    if _weights(folder, HALF_VARIANT):
        return HALF_VARIANT
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
    if pickled:
        raise ConfigError(
            f"{folder} has its weights as {pickled[0]} only, a pickle, which can run any code; only "
            f"*{SAFE} is loaded"
        )
    if has_weights:
        raise ConfigError(f"{folder} has no weights (*{SAFE}): download them")
    return None


def _weights(folder: Path, variant: str | None) -> list[Path]:
    marker = f".{HALF_VARIANT}."
    return sorted(file for file in folder.glob(f"*{SAFE}") if (marker in file.name) == (variant is not None))
