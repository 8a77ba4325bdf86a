"""vLLM's folder for what it may find again at the next start: compiled code, and what classes of models can do.

An engine that only fails to write there makes anew what it needs. vLLM tells that with two tracebacks for each file;
here it is told once, in one line. An engine that compiles needs the folder: torch's compiled code goes there first.
"""

import logging
from pathlib import Path

from omni_server.engine.disk_room import write_something
from omni_server.errors import ConfigError

logger = logging.getLogger(__name__)

_WRITERS = {
    "vllm.model_executor.model_loader.weight_utils": "Error during atomic write.",
    "vllm.model_executor.models.registry": "Error saving model info cache.",
}
"""Loggers of vLLM that report a file of this folder as not written, with the reason as the exception, and how they
begin. They report other things, too."""
_COMPILED = "torch_compile_cache"
"""vLLM's name for the part with compiled code (`vllm.compilation.backends`)."""


def check_cache_folder(folder: Path, *, compiles: bool) -> None:
    """Where it cannot be written: one warning that names the folder and the reason, in place of what vLLM would say of
    each file. `ConfigError` if a stage `compiles` and nothing is there that has been compiled before."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_something(folder)
    except OSError as error:
        problem = f"vLLM's cache {folder} cannot be written ({error.strerror})"
        remedy = "make room there, or set VLLM_CACHE_ROOT to a folder that can be written"
        if compiles and not (folder / _COMPILED).is_dir():
            raise ConfigError(f"{problem}, and the stages that are compiled need it: {remedy}") from error
        logger.warning("%s: what it would keep there is made anew at each start; %s", problem, remedy)
        for name in _WRITERS:
            logging.getLogger(name).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    if record.exc_info is None or not isinstance(record.exc_info[1], OSError):
        return True
    return not str(record.msg).startswith(_WRITERS[record.name])
