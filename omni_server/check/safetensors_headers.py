"""Reads names, types and shapes of weights from the headers of their files, without the weights
themselves."""

import json
import math
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

from omni_server.model_folder import PIPELINE_INDEX, config_file

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F4": 4,
}  # fmt: skip
WHOLE_NUMBERS = frozenset(("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64"))
"""The format's types that only quantized weights have."""


@dataclass(frozen=True)
class StoredTensor:
    """One weight as its file's header declares it."""

    file: str
    dtype: str
    """The format's name, such as `BF16`."""
    shape: tuple[int, ...]
    num_bytes: int


@dataclass
class StoredWeights:
    """All weights of a folder, and the problems of its files."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    num_files: int = 0
    num_bytes: int = 0
    """File sizes."""
    problems: list[str] = field(default_factory=list)


class _DamagedError(Exception):
    """The message says what is wrong with the file."""


def read_weights(folder: Path) -> StoredWeights:
    """Reads the files in model.safetensors.index.json, else all *.safetensors; `problems` lists damage.

    The weights of a Diffusers pipeline are in one folder per component, whose name precedes theirs:
    `unet/conv_in.weight`."""
    if config_file(folder).name != PIPELINE_INDEX:
        return _read_folder(folder)
    found = StoredWeights()
    for component in sorted(path for path in folder.iterdir() if path.is_dir()):
        part = _read_folder(component)
        found.tensors |= {
            f"{component.name}/{name}": replace(tensor, file=f"{component.name}/{tensor.file}")
            for name, tensor in part.tensors.items()
        }
        found.num_files += part.num_files
        found.num_bytes += part.num_bytes
        found.problems += part.problems
    return found


def _read_folder(folder: Path) -> StoredWeights:
    found = StoredWeights()
    index = _read_index(folder, found)
    files = (path.name for path in folder.glob("*.safetensors"))
    names = sorted(files if index is None else set(index.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        found.problems.append(
            f"{folder / 'model.safetensors.index.json'} names files outside of its folder "
            f"({_some(outside)}), which are not read: download the model again"
        )
        return found
    missing = [name for name in names if not (folder / name).is_file()]
    read: set[str] = set()
    for name in names:
        path = folder / name
        if name in missing:
            continue
        found.num_files += 1
        found.num_bytes += path.stat().st_size
        try:
            found.tensors |= _read_header(path)
            read.add(name)
        except _DamagedError as error:
            found.problems.append(f"{path}: {error}")
    if missing:
        found.problems.append(
            f"{folder}: {len(missing)} of the {len(names)} weight files that "
            f"model.safetensors.index.json names are missing ({_some(missing)}): download the "
            "model again"
        )
    for tensor, name in (index or {}).items():
        if name in read and tensor not in found.tensors:
            found.problems.append(
                f"{folder / name} lacks the weight {tensor}, which model.safetensors.index.json says it "
                "has: download both again"
            )
            break
    return found


def _read_index(folder: Path, found: StoredWeights) -> dict[str, str] | None:
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        weight_map = document["weight_map"]
        return {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        found.problems.append(
            f"{path}: no index of weights ({type(error).__name__}: {error}): download it again"
        )
        return None


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        if start.startswith(b"version "):
            raise _DamagedError(
                "is a pointer of Git LFS, not the file itself: run 'git lfs pull' in the folder"
            )
        if len(start) < _LENGTH_BYTES:
            raise _DamagedError(f"has {size} bytes only: download it again")
        (length,) = struct.unpack("<Q", start)
        if length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise _DamagedError(
                "has no header of the safetensors format, or is cut off in it: download it again"
            )
        header = file.read(length)
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {name: _tensor(path.name, entry) for name, entry in entries.items()}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise _DamagedError(f"has a header that cannot be read ({error}): download it again") from error
    expected = _LENGTH_BYTES + length + end
    if size != expected:
        what = "is cut off" if size < expected else "is too long"
        raise _DamagedError(f"{what}: {size:,} bytes, by its header it has {expected:,}: download it again")
    return tensors


def _tensor(file: str, entry: dict[str, object]) -> StoredTensor:
    shape, dtype, offsets = entry["shape"], entry["dtype"], entry["data_offsets"]
    if not (isinstance(shape, list) and isinstance(offsets, list) and isinstance(dtype, str)):
        raise ValueError("wrong types")
    num_bytes = offsets[1] - offsets[0]
    if dtype in _BITS and num_bytes * 8 != math.prod(shape) * _BITS[dtype]:
        raise ValueError(f"{num_bytes} bytes for {dtype}{shape}")
    return StoredTensor(file, dtype, tuple(shape), num_bytes)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
