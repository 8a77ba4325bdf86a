"""Logging of the server process, and of the engines where vLLM sets theirs up."""

import logging
import os
import sys
from pathlib import Path
from typing import Literal

from omni_server.log_format import TEXT_FORMAT, JsonFormatter

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")

JSON_LOGGING_OF_VLLM = Path(__file__).parent.parent / "json_logging.json"
"""vLLM's logging configuration for `--log-format json`; engine processes read it too."""

logger = logging.getLogger(__name__)


def set_up_logging(level: str, log_format: LogFormat) -> None:
    """Lines go to stderr. To be called before vLLM is imported, which reads its logging configuration then.

    `VLLM_LOGGING_CONFIG_PATH` is left alone where the operator has set it.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if log_format == "json":
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(JSON_LOGGING_OF_VLLM))


def log_progress(message: str) -> None:
    """For a log in which every line is JSON."""
    logger.info("%s", message)
