"""Reads the files of a checkpoint's folder, which may be damaged or somebody else's."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omni_server.errors import ConfigError

_MAX_REASON = 300


@contextmanager
def config_errors(problem: str) -> Iterator[None]:
    """Converts whatever is raised for a file to a `ConfigError` of one line. `problem` names the file."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{problem}: {reason[:_MAX_REASON]}") from error


def read_json(path: Path) -> object:
    """Raises `ConfigError`, also for JSON that is nested too deeply."""
    with config_errors(f"{path}: cannot be read as JSON"):
        document: object = json.loads(path.read_text(encoding="utf-8"))
    return document


def read_json_object(path: Path) -> dict[str, object]:
    """Raises `ConfigError` for anything else."""
    document = read_json(path)
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return document


@dataclass(frozen=True)
class StoredTensor:
    """One weight as its file's header declares it."""

    path: Path
    dtype: str
    """The format's name, such as `BF16`."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * num_bits(self.dtype) // 8


def num_bits(dtype: str) -> int:
    """The size of one value by the name of its type, as in torch (`bfloat16`) or safetensors (`F8_E4M3`)."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits is not None else 8  # BOOL


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """What the header of a safetensors file declares, by name. Raises `ConfigError` for a damaged file."""
    from safetensors import safe_open

    with config_errors(f"{path}: cannot be read as safetensors, download it again"):
        with path.open("rb") as start:
            if start.read(8) == b"version ":
                raise ConfigError(
                    f"{path}: is a pointer of Git LFS, not the file itself: run 'git lfs pull' in the folder"
                )
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            return {
                name: StoredTensor(path, tensor.get_dtype(), tuple(tensor.get_shape()))
                for name, tensor in slices.items()
            }


def read_weight_map(index: Path) -> dict[str, Path]:
    """The file of each weight by the name of the weight, as a `*.safetensors.index.json` says; some may be
    missing. Raises `ConfigError` if it does not say so, or names files outside of its folder."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index}: no weight_map: download it again")
    outside = sorted({str(name) for name in weight_map.values() if Path(str(name)).name != str(name)})
    if outside:
        raise ConfigError(
            f"{index} names files outside of its folder ({', '.join(outside[:3])}), which are not read: "
            "download the model again"
        )
    return {name: index.parent / str(file) for name, file in weight_map.items()}


def indexed_weight_files(index: Path) -> list[Path]:
    """The files of `read_weight_map`, sorted. Raises `ConfigError`."""
    return sorted(set(read_weight_map(index).values()))
