"""Checks whether a checkpoint's folder, found by `resolve_model_folder`, is complete, undamaged, and matches
its config.json. Of weights, it reads the headers of their files: names, types and shapes.

`serve`, `verify` and `Omni` check for damage before they start, and again if an engine does not start, to see
whether files are the cause: for damaged files vLLM prints hundreds of lines, the last of which names neither
the file nor the reason."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omni_server.config.checkpoint_files import (
    StoredTensor,
    read_json,
    read_json_object,
    read_tensors,
    read_weight_map,
)
from omni_server.config.model_folder import PIPELINE_INDEX, config_file
from omni_server.config.stage_config import StageConfig
from omni_server.engine.environment import set_engine_environment
from omni_server.errors import ConfigError
from omni_server.family import ModelFamily, load_family
from omni_server.family.footprint import StageFootprint

_WHOLE_NUMBERS = ("BOOL", "U", "I")
"""How the names of the format's types begin that only quantized weights have."""


@dataclass
class StoredWeights:
    """All weights of a folder, and the problems of its files."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    num_files: int = 0
    num_bytes: int = 0
    """File sizes."""
    problems: list[str] = field(default_factory=list)
    empty_folders: list[Path] = field(default_factory=list)
    """Those without weights that must have some."""


def read_weights(folder: Path, config: StageConfig) -> StoredWeights:
    """Reads the files in model.safetensors.index.json, else all *.safetensors; `problems` lists damage.

    The weights of a stage with a folder of its own, and of each component of a Diffusers pipeline, have its
    name before theirs: `unet/conv_in.weight`."""
    weights = StoredWeights()
    if config_file(folder).name == PIPELINE_INDEX:
        components = sorted(path for path in folder.iterdir() if path.is_dir())
        if not sum(_read_folder(component, f"{component.name}/", weights) for component in components):
            weights.empty_folders.append(folder)
        return weights
    for name in sorted({config.stage_spec(stage).folder or "" for stage in config.stages}):
        if not _read_folder(folder / name, f"{name}/" if name else "", weights):
            weights.empty_folders.append(folder / name)
    return weights


def _read_folder(folder: Path, prefix: str, weights: StoredWeights) -> int:
    """Returns how many files there are, or should be."""
    index = folder / "model.safetensors.index.json"
    weight_map: dict[str, Path] | None = None
    if index.is_file():
        try:
            weight_map = read_weight_map(index)
        except ConfigError as error:
            weights.problems.append(str(error))
    paths = sorted(folder.glob("*.safetensors") if weight_map is None else set(weight_map.values()))
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        weights.problems.append(
            f"{folder}: {len(missing)} of the {len(paths)} weight files that {index.name} names are missing "
            f"({', '.join(missing[:3])}{', ...' if missing[3:] else ''}): download the model again"
        )
    for path in paths:
        if path.name in missing:
            continue
        weights.num_files += 1
        weights.num_bytes += path.stat().st_size
        try:
            tensors = read_tensors(path)
        except ConfigError as error:
            weights.problems.append(str(error))
            continue
        weights.tensors |= {prefix + name: tensor for name, tensor in tensors.items()}
        expected = () if weight_map is None else weight_map.items()
        lacking = [name for name, file in expected if file == path and name not in tensors]
        if lacking:
            weights.problems.append(
                f"{path} lacks the weight {lacking[0]}, which {index.name} says it has: download both again"
            )
    return len(paths)


def refuse_damaged_files(folder: Path, config: StageConfig, *, load_format: str) -> None:
    """Checks the small files and the headers of the weights, within milliseconds. Raises `ConfigError`."""
    if problems := _damage(folder, config, {}, load_format=load_format):
        raise ConfigError(problems)


def explained(error: ConfigError, folder: Path, config: StageConfig, *, load_format: str) -> ConfigError:
    """Prefixes the `error` of a failed start with the problems of the checkpoint's files, if any.

    Compares every weight with config.json, which takes seconds.
    """
    try:
        footprints = load_family(config.model_family).footprints(folder, config)
        problems = _damage(folder, config, footprints, load_format=load_format)
    except ConfigError as reason:
        problems = str(reason)
    return ConfigError(f"{problems} ({error})") if problems not in ("", str(error)) else error


def _damage(
    folder: Path, config: StageConfig, footprints: Mapping[str, StageFootprint], *, load_format: str
) -> str:
    """One line; empty if there is none."""
    set_engine_environment(config)  # the family's imports read it
    problems = list(small_file_problems(folder, load_family(config.model_family)))
    if load_format != "dummy":
        problems += weight_problems(folder, read_weights(folder, config), footprints)
    return "; ".join(problems)


def small_file_problems(folder: Path, family: ModelFamily) -> Iterator[str]:
    """Yields missing tokenizer, preprocessor or voice files and bad JSON."""
    for needed in family.needed_files():
        if not any((folder / name).is_file() for name in needed.names):
            yield f"{folder} lacks {needed.purpose}: {' or '.join(needed.names)}; download it too"
    for path in sorted((*folder.glob("*.json"), *folder.glob("*/*.json"))):
        try:
            read_json(path)
        except ConfigError as error:
            yield f"{error}: download it again"


def weight_problems(
    folder: Path, stored: StoredWeights, footprints: Mapping[str, StageFootprint]
) -> Iterator[str]:
    """Yields missing or damaged files, and weights that are missing or misshapen."""
    for empty in stored.empty_folders:
        yield (
            f"{empty} has no weights in the format safetensors, the only one that is loaded: download them, "
            "or serve random ones with --load-format dummy"
        )
    yield from stored.problems
    if stored.empty_folders or stored.problems:
        return
    if "quantization_config" not in read_json_object(config_file(folder)):
        # Quantized weights have different names and shapes.
        yield from _type_problems(stored)
        for name, footprint in footprints.items():
            yield from _differences(name, footprint, stored)


def _type_problems(stored: StoredWeights) -> Iterator[str]:
    """Yields the first integer weight: it would be used as it is, and produce noise."""
    for name, tensor in stored.tensors.items():
        if name.endswith((".weight", ".bias")) and tensor.dtype.startswith(_WHOLE_NUMBERS):
            yield (
                f"{tensor.path}: the weight {name} is of type {tensor.dtype}, but config.json "
                "names no quantization: the file is damaged, or of another model"
            )
            return


def _differences(stage: str, footprint: StageFootprint, stored: StoredWeights) -> Iterator[str]:
    """Yields missing weights and the first wrong shape."""
    missing = [name for name in footprint.tensors if name not in stored.tensors]
    if missing:
        yield (
            f"stage '{stage}': {len(missing)} of its {len(footprint.tensors)} weights are in no file, the "
            f"first is {missing[0]}: the checkpoint is incomplete, or config.json is of another one"
        )
    for name, shape in footprint.tensors.items():
        tensor = stored.tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            yield (
                f"stage '{stage}': the weight {name} is {list(tensor.shape)} in {tensor.path.name}, by "
                f"config.json it is {list(shape)}: they are of different models"
            )
            return
