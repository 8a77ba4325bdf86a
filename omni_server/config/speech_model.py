"""Two checkpoints as one folder: a language model, and a speech model that reads its answers aloud."""

import hashlib
import json
import os
import uuid
from contextlib import suppress
from pathlib import Path

from omni_server.config.checkpoint_files import read_json_object
from omni_server.errors import ConfigError

SPOKEN_LLM = "SpokenLLM"
"""The architecture of such a folder."""
LLM_FOLDER, SPEECH_FOLDER = "llm", "speech"


def joined_folder(llm: Path, speech: Path) -> Path:
    """Returns a folder with a link to each, in the user's cache; the same for the same two.

    Raises `ConfigError` if it cannot be made.
    """
    links = {LLM_FOLDER: str(llm.resolve()), SPEECH_FOLDER: str(speech.resolve())}
    document: dict[str, object] = {"architectures": [SPOKEN_LLM], **links}
    quantization = read_json_object(llm / "config.json").get("quantization_config")
    if quantization is not None:  # read by whoever looks at the weights
        document["quantization_config"] = quantization
    config = json.dumps(document, indent=2)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "omni-server"
    folder = cache / hashlib.sha256(config.encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, target in links.items():
            with suppress(FileExistsError):
                (folder / name).symlink_to(target)
        if not (folder / "config.json").is_file():
            unfinished = folder / f"config.json.{uuid.uuid4().hex}"  # another server may make it now, too
            unfinished.write_text(config, encoding="utf-8")
            unfinished.rename(folder / "config.json")
    except OSError as error:
        raise ConfigError(
            f"{cache}: {error.strerror}: set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder
