"""HTTP server metrics: requests, answers and audio."""

from functools import partial
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from omni_server.api.request_record import AnswerRecord
from omni_server.metrics.buckets import FIRST_OUTPUT_S, HTTP_S, REAL_TIME_FACTOR, REQUEST_S, UNDERRUN_S

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format."""


class ServerMetrics:
    """Has its own registry, since vLLM registers metrics in the global one. Belongs to one event loop."""

    def __init__(self, version: str) -> None:
        disable_created_metrics()  # an extra series per metric that no dashboard reads
        registry = self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        ProcessCollector(registry=registry)
        gauge("omni_build_info", "Always 1; the label holds the version.", ["version"]).labels(version).set(1)
        self._http_requests = counter(
            "http_requests",
            "HTTP responses, by the route's template ('none' if no route matches), method and status.",
            ["handler", "method", "status"],
        )
        self._http_seconds = histogram(
            "http_request_duration_seconds",
            "From the first byte of a request to the last byte of its response, streams included.",
            ["handler", "method"],
            buckets=HTTP_S,
        )
        self._client_retries = counter(
            "omni_client_retries",
            "Requests that OpenAI's clients retried by themselves (x-stainless-retry-count).",
        )
        self.websockets = gauge("omni_websocket_sessions", "Open WebSocket sessions.")
        self.event_loop_tasks = gauge("omni_event_loop_tasks", "Unfinished tasks of the server's event loop.")
        self.answers_dropped = counter(
            "omni_slow_client_disconnects",
            "Answers that ended early because their clients read too slowly (--max-unsent-size).",
        )
        self.in_flight = gauge(
            "omni_requests_in_flight",
            "Requests and sessions that count towards --max-queue, from before the body is read to the end.",
        )
        self.limit = gauge("omni_requests_in_flight_limit", "--max-queue; 0 is no limit.")
        self._rejections = counter(
            "omni_admission_rejections",
            "Requests rejected by a limit: max_queue, max_total_body_size (503), max_concurrency_per_key "
            "(429).",
            ["reason"],
        )
        for reason in ("max_queue", "max_total_body_size", "max_concurrency_per_key"):
            self._rejections.labels(reason)
        self.running = gauge(
            "omni_requests_running",
            "Generations between submission and end, tokenisation and media preprocessing included.",
        )
        self._answers = counter(
            "omni_requests",
            "Finished generations: outcome ok (reason: finish reason), error (reason: error code) or "
            "aborted (by the client).",
            ["outcome", "reason"],
        )
        self._seconds = histogram(
            "omni_e2e_request_latency_seconds",
            "From submission to the end of successful generations, by kind of answer (text, speech, image).",
            ["kind"],
            buckets=REQUEST_S,
        )
        self._first_text = histogram(
            "omni_time_to_first_token_seconds",
            "From submission to the first token of the text (TTFT).",
            buckets=FIRST_OUTPUT_S,
        )
        self._first_audio = histogram(
            "omni_time_to_first_audio_seconds",
            "From submission to the first audio (TTFA).",
            buckets=FIRST_OUTPUT_S,
        )
        self._real_time_factor = histogram(
            "omni_audio_real_time_factor",
            "Real-time factor (RTF): time from submission to the last audio, by duration of the audio.",
            buckets=REAL_TIME_FACTOR,
        )
        self._underrun = histogram(
            "omni_audio_underrun_seconds",
            "Silence in a spoken answer for a player without a buffer that begins with the first audio.",
            buckets=UNDERRUN_S,
        )
        self._audio_output = counter("omni_audio_output_seconds", "Duration of the generated audio.")
        self._audio_input = counter(
            "omni_audio_input_seconds", "Duration of the audio in requests, without that of videos."
        )
        self._images = counter("omni_images", "Generated images.")
        self._image_steps = counter(
            "omni_image_steps", "Denoising steps of images, also of those that failed or were aborted."
        )

    def text(self) -> bytes:
        """All families in Prometheus' text format."""
        return generate_latest(self._registry)

    def http_ended(self, handler: str, method: str, status: int, seconds: float, *, is_retry: bool) -> None:
        self._http_requests.labels(handler, method, str(status)).inc()
        self._http_seconds.labels(handler, method).observe(seconds)
        if is_retry:
            self._client_retries.inc()

    def rejected(
        self, reason: Literal["max_queue", "max_total_body_size", "max_concurrency_per_key"]
    ) -> None:
        self._rejections.labels(reason).inc()

    def answer_ended(self, answer: AnswerRecord) -> None:
        """Decrements `running`, too."""
        self.running.dec()
        self._answers.labels(answer.outcome, answer.reason).inc()
        self._audio_input.inc(answer.audio_input_s)
        self._audio_output.inc(answer.audio_s)
        self._images.inc(answer.num_images)
        self._image_steps.inc(answer.num_steps)
        if answer.first_text_s is not None:
            self._first_text.observe(answer.first_text_s)
        if answer.first_audio_s is not None:
            self._first_audio.observe(answer.first_audio_s)
        if answer.outcome != "ok":
            return  # incomplete answers would distort timings
        self._seconds.labels(answer.kind).observe(answer.duration_s)
        if answer.last_audio_s is not None and answer.audio_s > 0:
            self._real_time_factor.observe(answer.last_audio_s / answer.audio_s)
            self._underrun.observe(answer.underrun_s)
