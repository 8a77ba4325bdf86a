"""LoRA adapters of a pipeline: all are loaded at the start, and each request chooses among them."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_server.config.checkpoint_files import config_errors
from omni_server.errors import ConfigError
from omni_server.types.images import Lora

Loras = tuple[Lora, ...]


def lora_file(place: str) -> Path:
    """Returns the local file of an option's value: a path, or `owner/name/file` on the hub, which is
    downloaded unless it is in the cache. Raises `ConfigError` if there is no such file."""
    path = Path(place).expanduser()
    if path.is_file():
        return path
    owner, _, rest = place.partition("/")
    name, _, file = rest.partition("/")
    if not (owner and name and file):
        raise ConfigError(
            f"loras: there is no file {place}; a file on the hub is written as OWNER/NAME/FILE.safetensors"
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(f"{owner}/{name}", file))
    except (OSError, ValueError) as error:  # of the hub, and of what can be no name of a repository
        raise ConfigError(
            f"loras: there is no file {place}, and it cannot be downloaded from the hub: "
            f"{' '.join(str(error).split())}"
        ) from error


def load_loras(pipe: Any, places: Mapping[str, str]) -> None:
    """Loads adapters by name, and switches all off. Raises `ConfigError` for one that does not fit."""
    for name, place in places.items():
        file = lora_file(place)
        with config_errors(f"loras: {file} is no LoRA for {type(pipe).__name__}"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # there may be several
            # By its folder: a path alone may be read as a name on the hub.
            pipe.load_lora_weights(
                file.parent,
                weight_name=file.name,
                adapter_name=name,
                use_safetensors=True,
                local_files_only=True,
            )
        if name not in {known for names in pipe.get_list_adapters().values() for known in names}:
            raise ConfigError(f"loras: {file} has no weights for {type(pipe).__name__}")
    if places:
        pipe.disable_lora()


class LoraSwitch:
    """Applies the adapters of the request whose turn it is."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._active: Loras = ()

    def use(self, loras: Loras) -> None:
        """Switching takes some milliseconds, and nothing if they are active already."""
        if loras == self._active:
            return
        if loras:
            self._pipe.enable_lora()
            self._pipe.set_adapters([lora.name for lora in loras], [lora.scale for lora in loras])
        else:
            self._pipe.disable_lora()
        self._active = loras
