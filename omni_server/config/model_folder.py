"""Resolves MODEL, a local folder or Hugging Face hub id, to the folder of a checkpoint. Also reads a
checkpoint's `about.json`.

The hub client itself reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE.
"""

import re
from collections.abc import Callable, Collection
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from omni_server.config.checkpoint_files import read_json_object
from omni_server.config.speech_model import SPOKEN_LLM
from omni_server.errors import ConfigError
from omni_server.types import AboutModel

EXAMPLE_MODEL = "Qwen/Qwen2.5-Omni-7B"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.pt", "*.model"]
"""Configs, tokenizer and voices."""
_WEIGHTS = ["*.safetensors"]
"""Excludes other files, such as images and weights in other formats."""
_PIPELINE_WEIGHTS = ["*/*.safetensors"]
"""Of a Diffusers pipeline. Its repository may have the same weights again, in one file."""

PIPELINE_INDEX = "model_index.json"
PIPELINE_ARCHITECTURE = "DiffusionPipeline"
"""The architecture of every folder with a `PIPELINE_INDEX`: the base class of all of Diffusers' pipelines."""


class HubUnreachableError(ConfigError):
    """The checkpoint is not on this machine, and the hub is unreachable."""


def resolve_model_folder(
    model: str,
    *,
    architectures: Collection[str] | None = None,
    argument: str = "MODEL",
    revision: str | None = None,
    needs_weights: bool = True,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Path:
    """Returns the folder of the checkpoint `model`; downloads it if it is a hub id that is not in the cache.
    `architectures` are the supported ones; None: any. `argument` is what errors call the model.

    Raises `ConfigError` if the folder or repository does not exist or holds no such checkpoint, and
    `HubUnreachableError` if a hub id cannot be looked up. `needs_weights=False` (load format `dummy`)
    downloads no weights.
    """
    label = f"{argument} '{model}'"
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if folder.exists():
            raise ConfigError(f"{label} is a file; give the folder that holds config.json and the weights")
        if not _HUB_ID.fullmatch(model):
            raise ConfigError(
                f"{label}: no such folder, and not a hub id either (those look like '{EXAMPLE_MODEL}')"
            )
        # Imported late: it takes half a second, and every command imports this module.
        from huggingface_hub import constants

        on_progress(f"looking up {model} in {constants.HF_HUB_CACHE}")
        folder = _download(label, model, revision, _SMALL_FILES)
        if needs_weights:
            weights = _PIPELINE_WEIGHTS if (folder / PIPELINE_INDEX).is_file() else _WEIGHTS
            folder = _download(label, model, revision, _SMALL_FILES + weights)
    _check_checkpoint(label, folder, architectures)
    return folder


def _download(label: str, repository: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import tqdm

    tqdm.monitor_interval = 0  # its thread would stay, but engines are forked from a single-threaded process
    revised = label if revision is None else f"{label} (revision {revision})"
    try:
        # Shows its own progress bars, per file and in total.
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        raise ConfigError(
            f"{label} asks its users to accept a licence: accept it on the model's page and set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{label} has no revision '{revision}'") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{label}: no such folder here and no such repository on the hub; check the spelling, "
            "and set HF_TOKEN if it is private"
        ) from error
    except IncompleteSnapshotError as error:
        raise HubUnreachableError(f"{revised} is in the cache in part only: {_why_unreachable()}") from error
    except LocalEntryNotFoundError as error:
        raise HubUnreachableError(
            f"{revised} is not in the cache {constants.HF_HUB_CACHE}: {_why_unreachable()}"
        ) from error
    except HFValidationError as error:
        raise ConfigError(f"{label}: no such folder, and not a hub id either: {error}") from error
    except HfHubHTTPError as error:
        raise HubUnreachableError(f"{label} cannot be downloaded: {error}") from error


def _why_unreachable() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return (
            "HF_HUB_OFFLINE is set, so nothing is downloaded; unset it, or set HF_HOME to a cache that has it"
        )
    return "the hub cannot be reached; check the network, or give a local folder"


def config_file(folder: Path) -> Path:
    """The file that says what the checkpoint is: config.json, or the index of a Diffusers pipeline."""
    config, index = folder / "config.json", folder / PIPELINE_INDEX
    return index if index.is_file() and not config.is_file() else config


def architectures_of(folder: Path) -> tuple[str, ...]:
    """Returns `architectures` of config.json, and `PIPELINE_ARCHITECTURE` for a Diffusers pipeline. Raises
    `ConfigError` if the file cannot be read."""
    if config_file(folder).name == PIPELINE_INDEX:
        return (PIPELINE_ARCHITECTURE,)
    names = read_json_object(folder / "config.json").get("architectures")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _check_checkpoint(label: str, folder: Path, architectures: Collection[str] | None) -> None:
    path = config_file(folder)
    if not path.is_file():
        raise ConfigError(f"{label} is no checkpoint: there is no config.json in {folder}")
    names = architectures_of(folder)
    if architectures is not None and set(architectures).isdisjoint(names):
        model_type = read_json_object(path).get("model_type", "missing")
        hint = "; --speech-model gives any language model a voice" if SPOKEN_LLM in architectures else ""
        raise ConfigError(
            f"{label} is not a checkpoint that this server can run: its config.json (model_type: "
            f"{model_type}) names {', '.join(names) or 'no architecture'}, and not "
            f"{' or '.join(architectures)}{hint}"
        )


def read_about(model_dir: Path) -> AboutModel | None:
    """Reads a checkpoint's `about.json`; None if there is no such file. Raises `ConfigError` if it is
    invalid."""
    path = model_dir / "about.json"
    try:
        return TypeAdapter(AboutModel).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {place + ': ' if place else ''}{first['msg']}") from error
