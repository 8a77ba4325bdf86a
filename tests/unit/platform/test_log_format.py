"""Lines of the log."""

import json
import logging
import subprocess
import sys
from collections.abc import Mapping

import pytest

from omni_server.platform.log_format import TEXT_FORMAT, Field, JsonFormatter, StructuredMessage


class Message(StructuredMessage):
    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._fields = fields

    def summary(self) -> str:
        return "GET / 200"

    def fields(self) -> Mapping[str, Field]:
        return self._fields


def record(message: object, *args: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("omni.test", level, __file__, 1, message, args, None)  # type: ignore[arg-type]


def as_json(record: logging.LogRecord) -> dict[str, object]:
    line = JsonFormatter().format(record)
    assert "\n" not in line
    parsed: dict[str, object] = json.loads(line)
    return parsed


def test_fields_are_written_as_names_and_values() -> None:
    message = Message(
        {"id": "a-1", "text": 'he "said" so', "empty": "", "count": 3, "s": 0.12345, "span": (0.1, 2.0)}
    )
    assert logging.Formatter("%(message)s").format(record(message)) == (
        'GET / 200 id=a-1 text="he \\"said\\" so" empty="" count=3 s=0.123 span=0.100-2.000'
    )


def test_a_field_cannot_begin_a_line_of_its_own() -> None:
    text = logging.Formatter(TEXT_FORMAT).format(record(Message({"id": "a\nb", "other": "c\u2028d"})))
    assert len(text.splitlines()) == 1


def test_json_has_the_fields_beside_the_usual_ones() -> None:
    line = as_json(record(Message({"id": "a\nb", "seconds": 1.5, "span": (0.1, 2.0)})))
    assert {name: line[name] for name in ("level", "logger", "message", "id", "seconds", "span")} == {
        "level": "INFO",
        "logger": "omni.test",
        "message": "GET / 200",
        "id": "a\nb",
        "seconds": 1.5,
        "span": [0.1, 2.0],
    }
    assert str(line["time"]).endswith("+00:00")


def test_json_has_ordinary_messages_and_tracebacks() -> None:
    try:
        raise ValueError("odd")
    except ValueError:
        given = logging.LogRecord("a", logging.ERROR, __file__, 1, "failed: %s", ("x",), sys.exc_info())
    line = as_json(given)
    assert line["message"] == "failed: x"
    assert "ValueError: odd" in str(line["exception"])


@pytest.mark.parametrize("text", ["ü 语", "\x00", "\ud800"])
def test_json_takes_any_text(text: str) -> None:
    assert as_json(record("%s", text))["message"] == text


def test_vllm_and_what_runs_in_its_processes_log_json_too() -> None:
    """In a process of its own: logging is set up once for all."""
    loggers = ["vllm.engine", "stages.runtime"]
    code = (
        "import logging; from omni_server.platform.log_format import set_up_logging\n"
        "set_up_logging('info', 'json')\n"
        "import vllm.logger\n"
        f"for name in {loggers}: logging.getLogger(name).info('from there')"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == ""
    lines = process.stderr.splitlines()
    assert [json.loads(line)["logger"] for line in lines if "from there" in line] == loggers
