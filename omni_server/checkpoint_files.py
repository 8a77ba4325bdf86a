"""Reads the JSON files of a checkpoint's folder."""

import json
from pathlib import Path

from omni_server.errors import ConfigError


def read_json_object(path: Path) -> dict[str, object]:
    """Raises `ConfigError` for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return document


def indexed_weight_files(index: Path) -> list[Path]:
    """The files that a `*.safetensors.index.json` names, sorted; some may be missing. Raises `ConfigError` if
    it names none."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index}: no weight_map")
    return [index.parent / name for name in sorted({str(name) for name in weight_map.values()})]
