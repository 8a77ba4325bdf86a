"""What the HTTP server counts: requests, answers, sound."""

from typing import Literal, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from omni_server.metrics.buckets import FIRST_OUTPUT_S, HTTP_S, REAL_TIME_FACTOR, REQUEST_S, UNDERRUN_S

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus' text format."""


class EndedAnswer(Protocol):
    """One generation that is over; implemented by `omni_server.api.request_record.AnswerRecord`. Times in seconds."""

    @property
    def outcome(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def is_spoken(self) -> bool: ...
    @property
    def duration_s(self) -> float: ...
    @property
    def first_text_s(self) -> float | None: ...
    @property
    def first_audio_s(self) -> float | None: ...
    @property
    def last_audio_s(self) -> float | None: ...
    @property
    def underrun_s(self) -> float: ...
    @property
    def audio_s(self) -> float: ...
    @property
    def audio_input_s(self) -> float: ...


class ServerMetrics:
    """Families in a registry of its own: vLLM registers some in the global one. Belongs to one event loop."""

    def __init__(self, version: str) -> None:
        disable_created_metrics()  # a second series for each one that no dashboard reads
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Gauge("omni_build_info", "Always 1; the label tells the version.", ["version"], registry=registry).labels(
            version
        ).set(1)
        self._http_requests = Counter(
            "http_requests",
            "HTTP responses, by the route's template ('none' where no route fits), method and status.",
            ["handler", "method", "status"],
            registry=registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "From the first byte of a request to the last byte of its response, streams included.",
            ["handler", "method"],
            buckets=HTTP_S,
            registry=registry,
        )
        self._client_retries = Counter(
            "omni_client_retries",
            "Requests that OpenAI's clients sent again by themselves (x-stainless-retry-count).",
            registry=registry,
        )
        self._websockets = Gauge("omni_websocket_sessions", "Open WebSocket sessions.", registry=registry)
        self.event_loop_tasks = Gauge(
            "omni_event_loop_tasks", "Tasks of the server's event loop that have not ended.", registry=registry
        )
        self.answers_dropped = Counter(
            "omni_answers_dropped",
            "Answers that were ended because their clients left too much of them untaken.",
            registry=registry,
        )
        self.in_flight = Gauge(
            "omni_queue_depth",
            "Requests and sessions that hold a place of --max-queue, from before their body is read to their end.",
            registry=registry,
        )
        self.limit = Gauge("omni_queue_limit", "--max-queue; 0 is no limit.", registry=registry)
        self._rejections = Counter(
            "omni_admission_rejections",
            "Requests refused by a limit: max_queue, max_total_body_size (503) or max_concurrency_per_key (429).",
            ["reason"],
            registry=registry,
        )
        for reason in ("max_queue", "max_total_body_size", "max_concurrency_per_key"):
            self._rejections.labels(reason)
        self._running = Gauge(
            "omni_requests_running",
            "Generations between submission and end, tokenisation and media preprocessing included.",
            registry=registry,
        )
        self._answers = Counter(
            "omni_requests",
            "Generations that ended: outcome ok (reason: finish reason), error (reason: error code) or aborted (by "
            "the client).",
            ["outcome", "reason"],
            registry=registry,
        )
        self._seconds = Histogram(
            "omni_request_seconds",
            "Submission to end of the generations that were finished, by kind of answer (text, speech).",
            ["kind"],
            buckets=REQUEST_S,
            registry=registry,
        )
        self._first_text = Histogram(
            "omni_time_to_first_text_seconds",
            "Submission to the first token of the text.",
            buckets=FIRST_OUTPUT_S,
            registry=registry,
        )
        self._first_audio = Histogram(
            "omni_time_to_first_audio_seconds",
            "Submission to the first sound.",
            buckets=FIRST_OUTPUT_S,
            registry=registry,
        )
        self._real_time_factor = Histogram(
            "omni_audio_real_time_factor",
            "Submission to the last sound, divided by the duration of the sound; below 1 is faster than real time.",
            buckets=REAL_TIME_FACTOR,
            registry=registry,
        )
        self._underrun = Histogram(
            "omni_audio_underrun_seconds",
            "Silence in a spoken answer for a player that begins with the first sound and keeps no reserve.",
            buckets=UNDERRUN_S,
            registry=registry,
        )
        self._audio_output = Counter("omni_audio_output_seconds", "Duration of the sound made.", registry=registry)
        self._audio_input = Counter(
            "omni_audio_input_seconds", "Duration of the sound in requests, without that of videos.", registry=registry
        )

    def text(self) -> bytes:
        """All families in Prometheus' text format."""
        return generate_latest(self._registry)

    def http_ended(self, handler: str, method: str, status: int, seconds: float, *, is_retry: bool) -> None:
        self._http_requests.labels(handler, method, str(status)).inc()
        self._http_seconds.labels(handler, method).observe(seconds)
        if is_retry:
            self._client_retries.inc()

    def websocket_began(self) -> None:
        self._websockets.inc()

    def websocket_ended(self) -> None:
        self._websockets.dec()

    def rejected(self, reason: Literal["max_queue", "max_total_body_size", "max_concurrency_per_key"]) -> None:
        self._rejections.labels(reason).inc()

    def answer_began(self) -> None:
        self._running.inc()

    def answer_ended(self, answer: EndedAnswer) -> None:
        """`answer_began` was called for it before."""
        self._running.dec()
        self._answers.labels(answer.outcome, answer.reason).inc()
        self._audio_input.inc(answer.audio_input_s)
        self._audio_output.inc(answer.audio_s)
        if answer.first_text_s is not None:
            self._first_text.observe(answer.first_text_s)
        if answer.first_audio_s is not None:
            self._first_audio.observe(answer.first_audio_s)
        if answer.outcome != "ok":
            return  # what was cut short says nothing about speed
        self._seconds.labels("speech" if answer.is_spoken else "text").observe(answer.duration_s)
        if answer.last_audio_s is not None and answer.audio_s > 0:
            self._real_time_factor.observe(answer.last_audio_s / answer.audio_s)
            self._underrun.observe(answer.underrun_s)
