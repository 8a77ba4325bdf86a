"""Text or JSON logs of the server process and, through vLLM's logging configuration, of its engines."""

import json
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
VLLM_JSON_LOGGING = Path(__file__).with_name("json_logging.json")
"""vLLM's logging configuration for `--log-format json`; engine processes read it as well."""

Field = str | int | float | tuple[float, float]


def set_up_logging(level: str, log_format: LogFormat) -> None:
    """Log to stderr. Call it before importing vLLM, which reads its logging configuration on import.

    The operator's `VLLM_LOGGING_CONFIG_PATH` takes precedence.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if log_format == "json":
        os.environ.setdefault("VLLM_LOGGING_CONFIG_PATH", str(VLLM_JSON_LOGGING))


class StructuredMessage(ABC):
    """A message with fields: `logger.info(message)`. Its text is the summary and the fields as
    `name=value`."""

    @abstractmethod
    def summary(self) -> str:
        """A few words for the event."""

    @abstractmethod
    def fields(self) -> Mapping[str, Field]:
        """Returns names and values in logging order. A pair of floats is a start and an end."""

    def __str__(self) -> str:
        return " ".join(
            [self.summary(), *(f"{name}={_text(value)}" for name, value in self.fields().items())]
        )


class JsonFormatter(logging.Formatter):
    """One JSON object on one line: `time` (UTC, RFC 3339), `level`, `logger`, `pid`, `message`, and the
    fields of a `StructuredMessage`; `exception` holds a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,  # engines are separate processes
        }
        if isinstance(record.msg, StructuredMessage):
            line["message"] = record.msg.summary()
            line |= {name: _rounded(value) for name, value in record.msg.fields().items()}
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _rounded(value: Field) -> Field:
    """Rounds to microseconds."""
    match value:
        case float():
            return round(value, 6)
        case (begin, end):
            return round(begin, 6), round(end, 6)
        case _:
            return value


def _text(value: Field) -> str:
    match value:
        case float():
            return f"{value:.3f}"
        case (begin, end):
            return f"{begin:.3f}-{end:.3f}"
        case int():
            return str(value)
        case _:
            is_plain = value != "" and value.isascii() and value.isprintable() and not set(value) & set(' "=')
            return value if is_plain else json.dumps(value)
