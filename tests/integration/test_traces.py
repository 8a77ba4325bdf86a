"""Traces of the real server process, with real engines behind them."""

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.integration.server_process import ServerProcess
from tests.integration.test_server import answer_to, num_tokens, spoken
from tests.unit.api.clients import URL
from tests.unit.api.collector import Collector, attributes

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def test_spoken_answer_has_its_stages_in_order_in_the_callers_trace(
    server: ServerProcess, collector: Collector
) -> None:
    def trace() -> dict[str, Span]:
        return {span.name: span for span in collector.spans if span.trace_id.hex() == TRACE_ID}

    with server.client() as client:
        client.headers["traceparent"] = f"00-{TRACE_ID}-b7ad6b7169203331-01"
        completion = answer_to(client, spoken())
    text_tokens, codec_tokens = num_tokens(completion)
    collector.wait_for(lambda: len(trace()) == 4)
    request, thinker, talker, code2wav = (
        trace()[name] for name in (f"POST {URL}", "thinker", "talker", "code2wav")
    )
    stages = [thinker, talker, code2wav]
    assert {stage.parent_span_id for stage in stages} == {request.span_id}
    begins = [span.start_time_unix_nano for span in (request, *stages)]
    assert begins == sorted(begins)
    assert talker.end_time_unix_nano <= code2wav.end_time_unix_nano <= request.end_time_unix_nano
    for stage in stages:
        (first,) = stage.events
        assert stage.start_time_unix_nano <= first.time_unix_nano <= stage.end_time_unix_nano
    told = attributes(request)
    assert told["gen_ai.usage.input_tokens"] == completion["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == text_tokens + codec_tokens
    assert attributes(thinker)["gen_ai.usage.completion_tokens"] == text_tokens
    assert attributes(talker)["gen_ai.usage.completion_tokens"] == codec_tokens
