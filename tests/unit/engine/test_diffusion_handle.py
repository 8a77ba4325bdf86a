"""A request of a diffusion stage leaves nothing behind, however it ends."""

import asyncio
from typing import cast

import pytest
from vllm import PoolingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.output_processor import RequestOutputCollector

from omni_server.engine.construction import BuiltEngine
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_processes import EngineProcesses
from omni_server.engine.event_engine import EventAsyncLLM, EventSink
from omni_server.engine.start_progress import StartProgress
from omni_server.errors import StageError


class FakeEngine:
    """Stands for `EventAsyncLLM`: a request is with the engine before `add_request` returns."""

    def __init__(self) -> None:
        self.errored = False
        self.event_sinks: dict[str, EventSink] = {}
        self.requests: set[str] = set()
        self.is_sent = asyncio.Event()
        self.queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "a-internal")

    async def add_request(
        self, request_id: str, engine_input: object, params: PoolingParams, *, priority: int
    ) -> RequestOutputCollector:
        self.requests.add(request_id)
        await self.is_sent.wait()
        return self.queue

    async def abort(self, request_id: str, *, internal: bool) -> None:
        self.requests.discard(request_id.removesuffix("-internal") if internal else request_id)


async def never_built(progress: StartProgress) -> BuiltEngine[EventAsyncLLM]:
    raise AssertionError("the engine is given")


async def running(engine: FakeEngine) -> asyncio.Task[object]:
    handle = DiffusionHandle("code2wav", never_built)
    handle.attach(BuiltEngine(cast(EventAsyncLLM, engine), cast(EngineProcesses, None)))
    task: asyncio.Task[object] = asyncio.create_task(handle.run("a", (1,), b"", on_event=print))
    await asyncio.sleep(0)
    assert engine.requests == {"a"}
    return task


@pytest.mark.parametrize("is_sent", [False, True], ids=["while it is sent", "while it runs"])
async def test_a_request_that_is_cancelled_does_not_run_on(is_sent: bool) -> None:
    engine = FakeEngine()
    task = await running(engine)
    if is_sent:
        engine.is_sent.set()
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.requests == set()
    assert engine.event_sinks == {}


async def test_a_request_that_fails_does_not_run_on() -> None:
    engine = FakeEngine()
    engine.is_sent.set()
    task = await running(engine)
    engine.queue.put(EngineGenerateError())
    with pytest.raises(StageError):
        await task
    assert engine.requests == set()
    assert engine.event_sinks == {}
