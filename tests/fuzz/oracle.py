"""What must hold of every answer, and of the log while it is made."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tests.unit.api.schema import check_error

MAX_ERROR_BYTES = 3_000
MAX_PARAM_CHARS = 300


class LoggedFault(AssertionError):
    """Something was logged as an error, or with a traceback."""


class _Watch(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.faults.append(f"{record.name}: {record.getMessage()[:300]} {record.exc_info}")


@contextmanager
def watched_log() -> Iterator["_Watch"]:
    """All loggers of this process, asyncio's and the web server's among them."""
    watch = _Watch()
    root = logging.getLogger()
    root.addHandler(watch)
    try:
        yield watch
        check_log(watch)  # of what has come after the last input
    finally:
        root.removeHandler(watch)


def check_log(watch: _Watch) -> None:
    faults, watch.faults = watch.faults, []
    if faults:
        raise LoggedFault(faults[0])


def check_refusal(status: int, headers: dict[str, str], body: bytes) -> str:
    """Of an HTTP answer that is not 200: no failure of the server, in the API's own shape. Returns its
    code."""
    assert 400 <= status < 500, f"status {status}: {body[:300]!r}"
    assert headers["content-type"] == "application/json", headers
    assert headers["x-request-id"]
    assert len(body) <= MAX_ERROR_BYTES
    envelope = json.loads(body)
    check_error(envelope)
    error = envelope["error"]
    assert error["code"], error
    assert error["type"] == ("permission_error" if status == 403 else "invalid_request_error")
    assert error["param"] is None or len(error["param"]) <= MAX_PARAM_CHARS
    return str(error["code"])
