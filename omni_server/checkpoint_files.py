"""Reads the files of a checkpoint's folder, which may be damaged or somebody else's."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
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


def indexed_weight_files(index: Path) -> list[Path]:
    """The files that a `*.safetensors.index.json` names, sorted; some may be missing. Raises `ConfigError` if
    it names none."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index}: no weight_map")
    return [index.parent / name for name in sorted({str(name) for name in weight_map.values()})]
