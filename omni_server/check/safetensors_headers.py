"""Reads names, types and shapes of weights from the headers of their files, without the weights
themselves."""

from dataclasses import dataclass, field
from pathlib import Path

from omni_server.config.checkpoint_files import StoredTensor, read_tensors, read_weight_map
from omni_server.config.model_folder import PIPELINE_INDEX, config_file
from omni_server.errors import ConfigError


@dataclass
class StoredWeights:
    """All weights of a folder, and the problems of its files."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    num_files: int = 0
    num_bytes: int = 0
    """File sizes."""
    problems: list[str] = field(default_factory=list)


def read_weights(folder: Path) -> StoredWeights:
    """Reads the files in model.safetensors.index.json, else all *.safetensors; `problems` lists damage.

    The weights of a Diffusers pipeline are in one folder per component, whose name precedes theirs:
    `unet/conv_in.weight`."""
    weights = StoredWeights()
    if config_file(folder).name != PIPELINE_INDEX:
        _read_folder(folder, "", weights)
        return weights
    for component in sorted(path for path in folder.iterdir() if path.is_dir()):
        _read_folder(component, f"{component.name}/", weights)
    return weights


def _read_folder(folder: Path, prefix: str, weights: StoredWeights) -> None:
    index = folder / "model.safetensors.index.json"
    weight_map: dict[str, Path] = {}
    if index.is_file():
        try:
            weight_map = read_weight_map(index)
        except ConfigError as error:
            weights.problems.append(str(error))
            return
    paths = sorted(set(weight_map.values()) or folder.glob("*.safetensors"))
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
        lacking = [name for name, file in weight_map.items() if file == path and name not in tensors]
        if lacking:
            weights.problems.append(
                f"{path} lacks the weight {lacking[0]}, which {index.name} says it has: download both again"
            )
