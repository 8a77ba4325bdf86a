"""Opening a request of an autoregressive stage, and what remains if that does not succeed."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from omni_server.engine.ar_client import ArStageClient
from omni_server.engine.async_engine import RowSink, StageAsyncLLM
from omni_server.errors import InvalidRequestError, StageDeadError
from omni_server.metrics.stage_metrics import ArStageMetrics
from omni_server.protocol.feeds import AddressedFeed
from omni_server.protocol.rows import RowsFeed
from omni_server.protocol.token_blocks import TOKENS_PER_OUTPUT_KEY


class FakeEngine:
    """Stands for `StageAsyncLLM`: a request is with the engine before `add_request` returns."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(max_model_len=64)
        self.vllm_config = SimpleNamespace(model_config=None, speculative_config=None, structured_outputs_config=None)
        self.row_sinks: dict[str, RowSink] = {}
        self.errored = False
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: dict[str, SamplingParams] = {}
        self.fed: list[AddressedFeed] = []
        self.stage_metrics: ArStageMetrics | None = None

    async def add_request(self, request_id: str, engine_input: object, params: SamplingParams) -> SimpleNamespace:
        if self.error is not None:
            raise self.error
        self.requests[request_id] = params
        await self.gate.wait()
        return SimpleNamespace(request_id=f"{request_id}-internal")

    def get_tokenizer(self) -> None:
        """`Refused` needs none."""

    async def abort(self, request_id: str, *, internal: bool) -> None:
        self.requests.pop(request_id.removesuffix("-internal") if internal else request_id, None)

    async def send_feeds(self, feeds: list[AddressedFeed]) -> None:
        if self.error is not None:
            raise self.error
        self.fed += feeds


class Refused(SamplingParams):
    """What vLLM refuses in words of the request."""

    def verify(self, *_: object) -> None:
        cause = ValueError("[12:34:56] /src/grammar.cc:1: rule\x1b[31m\u2028is cyclic\n")
        raise ValueError("no grammar:\r\n1970-01-01 INFO forged") from cause


def client_of(engine: FakeEngine) -> ArStageClient:
    return ArStageClient("talker", cast(StageAsyncLLM, engine))


def drop(payload: object) -> None:
    """A row sink."""


async def test_an_open_request_has_the_engines_own_id_and_its_sink() -> None:
    engine = FakeEngine()
    stream = await client_of(engine).open("a", (1, 2), SamplingParams(), drop)
    assert stream.engine_id == "a-internal"
    assert engine.row_sinks == {"a": drop}
    await stream.close()
    assert engine.row_sinks == {}
    assert engine.requests == {}


async def test_what_the_stage_did_is_counted_once_for_each_request() -> None:
    engine = FakeEngine()
    client = client_of(engine)
    assert engine.stage_metrics is client.metrics
    stream = await client.open("a", (1, 2), SamplingParams())
    await stream.close()
    await stream.close()
    engine.error = ValueError("no")
    with pytest.raises(InvalidRequestError):
        await client.open("b", (1, 2), SamplingParams())
    assert client.metrics.ended == {"abort": 1}


async def test_blocks_of_tokens_are_asked_for_only_where_they_are_wanted() -> None:
    engine = FakeEngine()
    await client_of(engine).open("text", (1,), SamplingParams(extra_args={"other": b""}))
    await client_of(engine).open("codes", (1,), SamplingParams(extra_args={"other": b""}), tokens_per_output=12)
    assert engine.requests["text"].extra_args == {"other": b""}
    assert engine.requests["codes"].extra_args == {"other": b"", TOKENS_PER_OUTPUT_KEY: 12}


async def test_a_request_that_is_cancelled_while_it_is_sent_does_not_run_on() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    opening = asyncio.create_task(client_of(engine).open("a", (1,), SamplingParams(), drop))
    await asyncio.sleep(0)
    assert "a" in engine.requests
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert engine.requests == {}
    assert engine.row_sinks == {}


async def test_a_refused_request_is_the_callers_mistake_and_leaves_nothing() -> None:
    engine = FakeEngine()
    engine.error = ValueError("top_k is too large")
    with pytest.raises(InvalidRequestError, match="top_k"):
        await client_of(engine).open("a", (1,), SamplingParams(), drop)
    assert engine.row_sinks == {}


async def test_a_refusal_is_one_line_without_control_characters() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client_of(FakeEngine()).check(Refused(), "tools")
    assert caught.value.message == "no grammar:  1970-01-01 INFO forged rule [31m is cyclic"
    assert caught.value.param == "tools"


async def test_a_dead_engine_takes_no_feeds() -> None:
    engine = FakeEngine()
    client = client_of(engine)
    await client.send_feeds([("a", RowsFeed(final_length=3))])
    assert engine.fed == [("a", RowsFeed(final_length=3))]
    engine.error = EngineDeadError()
    with pytest.raises(StageDeadError):
        await client.send_feeds([("a", RowsFeed(final_length=3))])
