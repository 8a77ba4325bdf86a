"""OpenTelemetry spans: one per request, with a child span for each stage of each answer.

Attribute names follow OpenTelemetry's semantic conventions for HTTP and generative AI, then vLLM's
`vllm.tracing`; all others begin with `omni.`. No attribute contains any content of requests or
answers.
"""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import Scope

from omni_server import __version__
from omni_server.api.request_record import AnswerRecord, RequestRecord
from omni_server.metrics.replica_name import split_replica_name
from omni_server.types import ModelInfo, SamplingConfig, StageTimes

logger = logging.getLogger(__name__)

_EXPORT_TIMEOUT_S = 5.0
"""For one batch, including retries."""
_CLOSE_TIMEOUT_S = 5.0
_MAX_WAITING_SPANS = 4096
"""The oldest are dropped beyond this: an unresponsive collector costs a few megabytes."""
_BATCH_SPANS = 512
_SEND_EVERY_S = 2.0

_PROPAGATOR = TraceContextTextMapPropagator()
_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/realtime": "chat",
}
_OTHER_OPERATION = "generate_content"
_PROVIDER = "omni-server"


class OtelTracer:
    """Sends spans in a thread of the SDK. Honours OpenTelemetry's environment variables for the
    resource, the exporter's headers and certificates, and sampling."""

    def __init__(self, url: str) -> None:
        """Spans go to `url` as protobuf over HTTP."""
        # No SDK shutdown at exit: a hanging collector would delay the end of the process.
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S),
                max_queue_size=_MAX_WAITING_SPANS,
                max_export_batch_size=_BATCH_SPANS,
                schedule_delay_millis=1000 * _SEND_EVERY_S,
            )
        )
        self._tracer = self._provider.get_tracer("omni_server", __version__)

    def began(self, scope: Scope, request_id: str) -> "OtelSpan":
        # The headers are untrusted: keys are checked later. Only a well-formed `traceparent` is accepted, and
        # no `tracestate`: its parser has been slow for long values and logs malformed ones.
        parent = Headers(scope=scope).get("traceparent", "")
        carrier = {"traceparent": parent} if _TRACEPARENT.fullmatch(parent) else {}
        span = self._tracer.start_span(
            scope["method"] if scope["type"] == "http" else "WEBSOCKET",
            context=_PROPAGATOR.extract(carrier, context=Context()),
            kind=SpanKind.SERVER,
            attributes={"url.scheme": scope["scheme"], "omni.request_id": request_id},
        )
        if scope.get("client"):
            span.set_attribute("client.address", scope["client"][0])
        return OtelSpan(self._tracer, span)

    async def __aenter__(self) -> "OtelTracer":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Sends the remaining spans, for a bounded time."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _CLOSE_TIMEOUT_S)
        if closing.is_alive():
            logger.warning("the last spans were not taken by the collector within %g s", _CLOSE_TIMEOUT_S)


class OtelSpan:
    """Implements `RequestSpan`."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._began_s = time.perf_counter()
        self._began_ns = time.time_ns()
        self._model: ModelInfo | None = None
        self._first: AnswerRecord | None = None
        self._failed: AnswerRecord | None = None
        self._num_input_tokens = 0
        self._num_output_tokens = 0

    def answer_ended(self, answer: AnswerRecord, model: ModelInfo) -> None:
        self._model = model
        if not self._span.is_recording():
            return
        self._first = self._first or answer
        if answer.outcome == "error":
            self._failed = self._failed or answer
        if answer.finished is not None:
            usage = answer.finished.usage
            self._num_input_tokens += 0 if answer.is_sibling_choice else usage.prompt.total
            self._num_output_tokens += usage.text_tokens + usage.codec_tokens + usage.image_tokens
        if answer.admitted_s is not None:
            self._add_stages(answer, model, answer.admitted_s)

    def ended(self, record: RequestRecord, *, method: str, route: str | None, status: int) -> None:
        span = self._span
        if span.is_recording():
            span.update_name(method if route is None else f"{method} {route}")
            if route is not None:
                span.set_attribute("http.route", route)
            span.set_attributes({"http.response.status_code": status, "omni.caller": record.caller})
            if method != "WEBSOCKET":
                span.set_attribute("http.request.method", method)
            if self._first is not None and self._model is not None:
                span.set_attributes(self._of_answer(self._first, self._model, route))
            code = record.error_code or (None if self._failed is None else self._failed.reason)
            if status >= 500 or (status < 400 and self._failed is not None):
                span.set_status(Status(StatusCode.ERROR))
                span.set_attribute("error.type", code or str(status))
            elif code is not None:
                span.set_attribute("omni.error_code", code)
        span.end()

    def _add_stages(self, answer: AnswerRecord, model: ModelInfo, admitted_s: float) -> None:
        """Adds the stages' spans, whose times arrive with the last event. A failed answer has only a span for
        the failed stage, if known."""
        began_s = answer.began + admitted_s  # the stages received the request
        if answer.finished is not None:
            for name, times in answer.finished.times.items():
                if times.last_output_s is not None:
                    attributes = _of_stage(name, times, answer, model)
                    span = self._stage_span(name, answer, began_s + times.submitted_s, attributes)
                    if times.first_output_s is not None:
                        span.add_event("first output", timestamp=self._ns(began_s + times.first_output_s))
                    span.end(self._ns(began_s + times.last_output_s))
        elif answer.failed_stage is not None:
            attributes = {"gen_ai.request.model": model.name, "error.type": answer.reason}
            span = self._stage_span(answer.failed_stage, answer, began_s, attributes)
            span.set_status(Status(StatusCode.ERROR))
            span.end(self._ns(answer.began + answer.duration_s))

    def _of_answer(
        self, answer: AnswerRecord, model: ModelInfo, route: str | None
    ) -> Mapping[str, AttributeValue]:
        """Attributes of the first answer; token counts are those of all."""
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": _OPERATIONS.get(route or "", _OTHER_OPERATION),
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.request.model": model.name,
            "gen_ai.response.model": model.name,
            "gen_ai.response.id": answer.answer_id,
            "gen_ai.output.type": answer.kind,
            "omni.outcome": answer.outcome,
        }
        if answer.finished is not None:
            attributes["gen_ai.usage.input_tokens"] = self._num_input_tokens
            attributes["gen_ai.usage.output_tokens"] = self._num_output_tokens
            attributes["gen_ai.response.finish_reasons"] = (answer.finished.finish_reason,)
        if answer.first_audio_s is not None:
            attributes["omni.time_to_first_audio"] = answer.first_audio_s
        return attributes

    def _stage_span(
        self, name: str, answer: AnswerRecord, begin_s: float, attributes: Mapping[str, AttributeValue]
    ) -> Span:
        """`name`: of a stage or of one of its replicas."""
        stage, replica = split_replica_name(name)
        span = self._tracer.start_span(
            stage,
            context=set_span_in_context(self._span, Context()),
            kind=SpanKind.INTERNAL,
            attributes={"omni.stage": stage, "gen_ai.request.id": answer.answer_id, **attributes},
            start_time=self._ns(begin_s),
        )
        if replica is not None:
            span.set_attribute("omni.replica", int(replica))
        return span

    def _ns(self, perf_counter_s: float) -> int:
        """Unix time in ns."""
        return self._began_ns + round(1e9 * (perf_counter_s - self._began_s))


def _of_stage(
    name: str, times: StageTimes, answer: AnswerRecord, model: ModelInfo
) -> Mapping[str, AttributeValue]:
    """Attributes of the stage `name` for a successful answer."""
    assert answer.finished is not None
    usage = answer.finished.usage
    attributes: dict[str, AttributeValue] = {"gen_ai.request.model": model.name}
    if times.replica is not None:
        attributes["omni.replica"] = times.replica
    if name == model.text_stage:
        attributes["gen_ai.usage.prompt_tokens"] = usage.prompt.total
        attributes["gen_ai.usage.completion_tokens"] = usage.text_tokens
        asked = answer.sampling.get(name, SamplingConfig())
        for parameter, value in (
            ("max_tokens", asked.max_tokens),
            ("temperature", asked.temperature),
            ("top_p", asked.top_p),
        ):
            if value is not None:
                attributes[f"gen_ai.request.{parameter}"] = value
        if times.first_output_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = times.first_output_s
    elif name == model.speech_stage:
        attributes["gen_ai.usage.completion_tokens"] = usage.codec_tokens
    if times.windows:
        attributes["omni.windows"] = len(times.windows)
        attributes["omni.audio_seconds"] = answer.audio_s
    return attributes


def _resource() -> Resource:
    """OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override these values."""
    named = Resource.create()
    own = {SERVICE_NAME: "omni-server", SERVICE_VERSION: __version__}
    if not str(named.attributes[SERVICE_NAME]).startswith("unknown_service"):
        del own[SERVICE_NAME]
    return named.merge(Resource(own))
