"""What the web server's own log may say: nothing that holds a key."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
import websockets

_LOGGERS = ("uvicorn.error", "uvicorn.asgi")
_UVICORN = Path(uvicorn.__file__).parent
_SOURCES = (
    f"{Path(websockets.__file__).parent}/",  # headers of handshakes, and frames
    f"{_UVICORN}/protocols/websockets/",  # URLs with their query
    f"{_UVICORN}/middleware/message_logger.py",  # scopes: subprotocols, URLs with their query
)

_OF_CLIENTS = frozenset(
    {
        "Invalid HTTP request received.",  # it has a line of its own
        "Invalid UTF-8 sequence received from client.",  # with a traceback; the client is told by code 1007
        "ASGI callable returned without completing handshake.",  # of one that left meanwhile
    }
)


@contextmanager
def keys_kept_out() -> Iterator[None]:
    """While the block lasts, what uvicorn and websockets write about requests below WARNING is dropped.

    A key may be in the headers of a handshake, in its subprotocol and in the query of its URL. uvicorn gives its own
    logger to websockets, which writes all that it sends and receives at DEBUG; uvicorn itself writes the URL of every
    WebSocket at INFO, and everything but headers and bodies at its level TRACE. What it calls errors but are a client's
    is dropped too: anybody could fill the log with it.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(_may_be_written)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_may_be_written)


def _may_be_written(record: logging.LogRecord) -> bool:
    if record.msg in _OF_CLIENTS:
        return False
    return record.levelno >= logging.WARNING or not record.pathname.startswith(_SOURCES)
