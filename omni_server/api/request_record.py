"""What is known about the HTTP request that is being served, for its log line and for limits."""

import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.types import Scope

from omni_server.api.answer_record import AnswerRecord
from omni_server.api.request_span import RequestSpan
from omni_server.errors import OmniError

ANONYMOUS = "anonymous"
"""Name of a caller without a key."""


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


@dataclass
class RequestRecord:
    """One HTTP request or WebSocket session. Middlewares and routes fill it, the access log reads it at the end."""

    request_id: str
    is_websocket: bool = False
    is_logged: bool = True
    """Its end is worth a line, and so is that of each answer in a session."""
    caller: str = ANONYMOUS
    """Name of the API key, never the key."""
    num_retries: int = 0
    """How often the client has sent this request before, as OpenAI's clients tell it."""
    error: OmniError | None = None
    """What was answered, if the answer is an error."""
    answers: list[AnswerRecord] = field(default_factory=list)
    """Generations that were started for it; for a session, which may go on for hours, none are kept."""
    span: RequestSpan | None = None
    """None where it is not traced."""
    began: float = field(default_factory=time.perf_counter)
    has_response_begun: bool = False
    on_response: list[Callable[[], object]] = field(default_factory=list)
    """Called when the response begins. For middleware that waits for that only: a `send` of its own around each piece
    of a stream would cost more."""

    def response_begins(self) -> None:
        self.has_response_begun = True
        for call in self.on_response:
            call()


_current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def begin_request(record: RequestRecord) -> None:
    """`record` is the current one from now on, in this task and in those that it creates."""
    _current.set(record)


def current_request() -> RequestRecord | None:
    """Of the request that the running task serves; None outside of any."""
    return _current.get()


def path_of(scope: Scope) -> str:
    """The request's path as the routes know it: without `--root-path`, which a proxy may have removed or not."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
