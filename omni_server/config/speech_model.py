"""Two checkpoints as one folder: a language model, and a speech model that reads its answers aloud."""

import hashlib
import json
import os
import shutil
import tempfile
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
    if _is_whole(folder):
        return folder
    try:
        shutil.rmtree(folder, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=cache))
        try:
            (unfinished / "config.json").write_text(config, encoding="utf-8")
            for name, target in links.items():
                (unfinished / name).symlink_to(target)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if not _is_whole(folder):  # another server has not made it meanwhile
            raise ConfigError(
                f"{cache}: {error.strerror}: set XDG_CACHE_HOME to a folder that can be written"
            ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    return all((folder / name).exists() for name in ("config.json", LLM_FOLDER, SPEECH_FOLDER))
