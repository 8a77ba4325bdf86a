"""What is known about the request that is being served and about its answers, for log, metrics,
traces and limits."""

import time
import uuid
from collections.abc import Callable
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

ANONYMOUS = "anonymous"
"""Name of a caller without a key."""

Outcome = Literal["running", "ok", "error", "aborted"]
AnswerKind = Literal["text", "speech", "image"]


class AnswerRecord:
    """One generation, known from its events. Times are in seconds since the request was submitted, so they
    include tokenisation and media preprocessing."""

    def __init__(
        self,
        request: OmniRequest,
        *,
        on_end: "Callable[[AnswerRecord], None] | None" = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`on_end` is called once, when the outcome is known."""
        self._clock = clock
        self._on_end = on_end
        self.began = clock()
        """By the clock; all other times count from here."""
        self.answer_id = request.request_id
        self.kind: AnswerKind = (
            "image" if request.image is not None else "speech" if request.speech is not None else "text"
        )
        self.audio_input_s = 0.0 if request.is_another_choice else _audio_s(request)
        self.is_another_choice = request.is_another_choice
        self.sampling = request.sampling
        self.prompt: PromptTokens | None = None
        """None until the request has been admitted."""
        self.admitted_s: float | None = None
        """The stages were given the request."""
        self.first_text_s: float | None = None
        self.first_audio_s: float | None = None
        self.last_audio_s: float | None = None
        self.num_samples = 0
        self.underrun_s = 0.0
        """How long a player without a buffer would have been silent that began with the first audio."""
        self._played_until_s = 0.0
        self.finished: Finished | None = None
        self.outcome: Outcome = "running"
        self.reason = ""
        """Why it ended: the finish reason, or the code of the error."""
        self.failed_stage: str | None = None
        self.duration_s = 0.0

    @property
    def audio_s(self) -> float:
        """Seconds of audio that were made."""
        return self.num_samples / SAMPLE_RATE_HZ

    def shortened(self, request: OmniRequest) -> None:
        """The prompt was too long; `request` is tried instead."""
        self.audio_input_s = _audio_s(request)

    def admitted(self, prompt: PromptTokens) -> None:
        self.prompt = prompt
        self.admitted_s = self._now()

    def take(self, event: OmniEvent) -> None:
        """Called for each event, so it does little."""
        match event:
            case TextDelta():
                if self.first_text_s is None and event.token_ids:
                    self.first_text_s = self._now()
            case AudioDelta():
                self._audio(len(event.samples), self._now())
            case Finished():
                self.finished = event
                self._end("ok", event.finish_reason)

    def failed(self, error: Exception) -> None:
        if self.outcome == "running" and isinstance(error, StageError):
            self.failed_stage = error.stage
        self._end("error", (error.code or "") if isinstance(error, OmniError) else "internal_error")

    def closed(self, abort_error: OmniError | None = None) -> None:
        """The caller wants no more, or the server ends the answer with `abort_error`. Ignored
        after the end."""
        if abort_error is not None:
            self.failed(abort_error)
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
            on_end, self._on_end = self._on_end, None  # what it refers to may refer to this
            if on_end is not None:
                on_end(self)

    def _now(self) -> float:
        return self._clock() - self.began


class RequestSpan(Protocol):
    """What a trace learns of one request, or of one WebSocket session. `omni_server.api.otel` implements it."""

    def answer_ended(self, answer: AnswerRecord, model: ModelInfo) -> None:
        """A generation that was started for it is over."""
        ...

    def ended(self, record: "RequestRecord", *, method: str, route: str | None, status: int) -> None:
        """Nothing follows. `route` is a template, None where no route took the request."""
        ...


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex}"


@dataclass
class RequestRecord:
    """One HTTP request or WebSocket session. Middlewares and routes fill it, the access log reads it
    at the end."""

    request_id: str
    is_websocket: bool = False
    is_logged: bool = True
    """Its end is worth a line, and so is that of each answer in a session."""
    caller: str = ANONYMOUS
    """Name of the API key, never the key."""
    num_retries: int = 0
    """How often the client has sent this request before, as OpenAI's clients report it."""
    error: OmniError | None = None
    """What was answered, if the answer is an error."""
    answers: list[AnswerRecord] = field(default_factory=list)
    """Generations that were started for it; none are kept for a session, which may go on for hours."""
    span: RequestSpan | None = None
    """None where it is not traced."""
    places: ExitStack = field(default_factory=ExitStack)
    """What it takes of the server's limits; closed when it is over."""
    began: float = field(default_factory=time.perf_counter)
    has_response_begun: bool = False
    on_response: list[Callable[[], object]] = field(default_factory=list)
    """Called when the response begins. For middleware that waits for that only: wrapping `send` around every
    piece of a stream would cost more."""

    @property
    def error_code(self) -> str | None:
        return None if self.error is None else self.error.code or self.error.type

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
    """The request's path as the routes know it: without `--root-path`, which a proxy may have
    removed or not."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def _audio_s(request: OmniRequest) -> float:
    """Seconds of audio that were sent."""
    parts = [part for message in request.messages for part in message.content]
    return sum(len(part.samples) / part.sample_rate_hz for part in parts if isinstance(part, AudioPart))
