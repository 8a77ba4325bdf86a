"""Records of the current request and its answers, for the log, metrics, traces and
limits."""

import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, Protocol

from starlette.types import Scope

from omni_server.errors import OmniError, StageError
from omni_server.types import (
    SAMPLE_RATE_HZ,
    AudioDelta,
    AudioPart,
    Finished,
    ModelInfo,
    OmniEvent,
    OmniRequest,
    PromptTokens,
    TextDelta,
)
from omni_server.types.images import ImageDone, ImageProgress

ANONYMOUS = "anonymous"
"""Caller name without a key."""

Outcome = Literal["running", "ok", "error", "aborted"]
AnswerKind = Literal["text", "speech", "image"]


class AnswerRecord:
    """One generation, observed through its events. Times are in seconds since submission, so they include
    tokenisation and media preprocessing."""

    def __init__(
        self,
        request: OmniRequest,
        *,
        on_end: "Callable[[AnswerRecord], None] | None" = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Calls `on_end` once, when the outcome is known."""
        self._clock = clock
        self._on_end = on_end
        self.began = clock()
        """Clock time; the origin of all other times."""
        self.answer_id = request.request_id
        self.kind: AnswerKind = (
            "image" if request.image is not None else "speech" if request.speech is not None else "text"
        )
        self.audio_input_s = 0.0 if request.is_sibling_choice else _audio_s(request)
        self.is_sibling_choice = request.is_sibling_choice
        self.sampling = request.sampling
        self.prompt: PromptTokens | None = None
        """None until the request is admitted."""
        self.admitted_s: float | None = None
        """When the stages got the request."""
        self.first_text_s: float | None = None
        self.first_audio_s: float | None = None
        self.last_audio_s: float | None = None
        self.num_samples = 0
        self.num_images = 0
        self.num_steps = 0
        """Denoising steps done."""
        self.underrun_s = 0.0
        """Total silence of a player that starts with the first audio and has no playout buffer."""
        self._played_until_s = 0.0
        self.finished: Finished | None = None
        self.outcome: Outcome = "running"
        self.reason = ""
        """Why it ended: the finish reason or the error code."""
        self.failed_stage: str | None = None
        self.duration_s = 0.0

    @property
    def audio_s(self) -> float:
        """Seconds of generated audio."""
        return self.num_samples / SAMPLE_RATE_HZ

    def shortened(self, request: OmniRequest) -> None:
        """The prompt was too long; `request` replaces it."""
        self.audio_input_s = _audio_s(request)

    def admitted(self, prompt: PromptTokens, began: float) -> None:
        """`began`: clock time when the stages received the request."""
        self.prompt = prompt
        self.admitted_s = began - self.began

    def take(self, event: OmniEvent | Exception) -> None:
        """Called for each event and for a failure: must be fast."""
        if self.outcome != "running":
            return
        match event:
            case TextDelta():
                if self.first_text_s is None and event.token_ids:
                    self.first_text_s = self._now()
            case AudioDelta():
                self._audio(len(event.samples), self._now())
            case ImageProgress():
                self.num_steps = event.step
            case ImageDone():
                self.num_images += 1
            case Finished():
                self.finished = event
                self._end("ok", event.finish_reason)
            case Exception():
                self._failed(event)

    def _failed(self, error: Exception) -> None:
        if self.outcome == "running" and isinstance(error, StageError):
            self.failed_stage = error.stage
        self._end("error", (error.code or "") if isinstance(error, OmniError) else "internal_error")

    def closed(self, abort_error: OmniError | None = None) -> None:
        """The caller has closed the answer, or the server aborts it with `abort_error`. No-op after
        the end."""
        if abort_error is not None:
            self._failed(abort_error)
        else:
            self._end("aborted", "")

    def _audio(self, num_samples: int, now: float) -> None:
        if self.first_audio_s is None:
            self.first_audio_s = self._played_until_s = now
        elif now > self._played_until_s:
            self.underrun_s += now - self._played_until_s
            self._played_until_s = now
        self.last_audio_s = now
        self.num_samples += num_samples
        self._played_until_s += num_samples / SAMPLE_RATE_HZ

    def _end(self, outcome: Outcome, reason: str) -> None:
        if self.outcome == "running":
            self.outcome, self.reason, self.duration_s = outcome, reason, self._now()
            on_end, self._on_end = self._on_end, None  # breaks a reference cycle
            if on_end is not None:
                on_end(self)

    def _now(self) -> float:
        return self._clock() - self.began


class RequestSpan(Protocol):
    """Traces one request or WebSocket session. Implemented by `omni_server.api.otel`."""

    def answer_ended(self, answer: AnswerRecord, model: ModelInfo) -> None:
        """One of the request's generations has ended."""
        ...

    def ended(self, record: "RequestRecord", *, method: str, route: str | None, status: int) -> None:
        """The request has ended. `route` is a template, or None if no route matched."""
        ...


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


@dataclass
class RequestRecord:
    """One HTTP request or WebSocket session. Middleware and routes fill it; the access log reads it
    at the end."""

    request_id: str
    is_websocket: bool = False
    is_logged: bool = True
    """Whether its end, and that of each answer in a session, is logged."""
    caller: str = ANONYMOUS
    """Name of the API key, not the key."""
    num_retries: int = 0
    """Number of earlier attempts, as reported by OpenAI's clients."""
    error: OmniError | None = None
    """The error sent as the response, if any."""
    answers: list[AnswerRecord] = field(default_factory=list)
    """The request's generations; none are kept for a session, which may last for hours."""
    span: RequestSpan | None = None
    """None if it is not traced."""
    places: ExitStack = field(default_factory=ExitStack)
    """Its slots in the server's limits; closed when it ends."""
    hold_memory: Callable[[int], Awaitable[None]] | None = None
    """Counts bytes as its body's; None without a body."""
    began: float = field(default_factory=time.perf_counter)
    has_response_begun: bool = False
    on_response: list[Callable[[], object]] = field(default_factory=list)
    """Called when the response begins. Cheaper for middleware than wrapping `send`, which runs for every
    piece of a stream."""

    @property
    def error_code(self) -> str | None:
        return None if self.error is None else self.error.code or self.error.type

    def response_begins(self) -> None:
        self.has_response_begun = True
        for call in self.on_response:
            call()


_current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def begin_request(record: RequestRecord) -> None:
    """Makes `record` the current one in this task and in tasks that it creates."""
    _current.set(record)


def current_request() -> RequestRecord | None:
    """The record of the current task's request; None outside requests."""
    return _current.get()


async def hold_memory(num_bytes: int) -> None:
    """Counts what the current request loads as if it were in its body, until its response begins.

    Raises `OverloadedError`.
    """
    record = current_request()
    assert record is not None
    assert record.hold_memory is not None
    await record.hold_memory(num_bytes)


def path_of(scope: Scope) -> str:
    """The request's path as the routes see it: without `--root-path`, whether or not a proxy has
    stripped it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _audio_s(request: OmniRequest) -> float:
    """Seconds of audio in the request."""
    parts = [part for message in request.messages for part in message.content]
    return sum(len(part.samples) / part.sample_rate_hz for part in parts if isinstance(part, AudioPart))
