"""A client that leaves ends its request everywhere."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from omni_server.api.streaming import until_disconnect
from omni_server.types import TextDelta
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import SPEECH, Endpoint, app_of, chat, each_endpoint
from tests.unit.api.fake_generator import FakeGenerator, Hang

SPOKEN_STREAM = SPEECH | {"stream": True}


async def submission_to(generator: FakeGenerator) -> None:
    await asyncio.wait_for(generator.submitted.wait(), 10)


async def closing_by(generator: FakeGenerator) -> None:
    await asyncio.wait_for(generator.generations[0].closed.wait(), 10)


@pytest.mark.parametrize("fields", [{"stream": True}, SPOKEN_STREAM])
@each_endpoint
async def test_leaving_a_stream_closes_the_generation(endpoint: Endpoint, fields: dict[str, object]) -> None:
    generator = FakeGenerator(script=[TextDelta("a", (1,)), Hang()])
    async with AsgiCall(app_of(generator), endpoint.body(**fields), path=endpoint.url) as call:
        await call.body_until(b'"a"')
        assert generator.generations[0].num_closed == 0
        call.leave()
        await closing_by(generator)


@pytest.mark.parametrize("fields", [{}, SPEECH])
@each_endpoint
async def test_leaving_before_the_whole_answer_closes_the_generation(
    endpoint: Endpoint, fields: dict[str, object]
) -> None:
    generator = FakeGenerator(script=[TextDelta("a", (1,)), Hang()])
    async with AsgiCall(app_of(generator), endpoint.body(**fields), path=endpoint.url) as call:
        await submission_to(generator)
        call.leave()
        await closing_by(generator)


@pytest.mark.parametrize("stream", [False, True])
@each_endpoint
async def test_leaving_while_the_request_waits_for_admission_cancels_it(
    endpoint: Endpoint, stream: bool
) -> None:
    generator = FakeGenerator()
    generator.submit_hangs = True
    async with AsgiCall(app_of(generator), endpoint.body(stream=stream), path=endpoint.url):
        await submission_to(generator)
    assert generator.submit_cancelled


async def test_leaving_at_once_after_admission_still_closes_the_generation() -> None:
    generator = FakeGenerator(script=[Hang()])
    async with AsgiCall(app_of(generator), chat(stream=True)) as call:
        call.leave()
        await call.task
    assert all(generation.num_closed == 1 for generation in generator.generations)


async def test_cancelling_the_request_task_closes_the_generation() -> None:
    generator = FakeGenerator(script=[Hang()])
    async with AsgiCall(app_of(generator), chat(stream=True)) as call:
        await call.body_until(b"assistant")
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.task
        call.task = asyncio.ensure_future(asyncio.sleep(0))
    assert generator.generations[0].num_closed == 1


async def test_leaving_in_the_middle_of_the_body_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    generator = FakeGenerator()
    async with AsgiCall(app_of(generator), raw_body=[b'{"model":'], body_ends=False) as call:
        call.leave()
        await call.task
    assert generator.requests == []
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class Caller:
    """Of `until_disconnect`, in a task: what it is told about its client, and what came of it."""

    def __init__(self, work: Coroutine[Any, Any, str]) -> None:
        self.leave, self.has_outcome = asyncio.Event(), asyncio.Event()
        self.outcome: str | None = None
        self.task = asyncio.create_task(self._run(work))

    async def _run(self, work: Coroutine[Any, Any, str]) -> None:
        try:
            self.outcome = await until_disconnect(work, self._receive)
        except ClientDisconnect:
            self.outcome = "left"
        self.has_outcome.set()
        await asyncio.sleep(0)  # as whoever releases something would

    async def _receive(self) -> Message:
        await self.leave.wait()
        return {"type": "http.disconnect"}


async def test_work_is_cancelled_when_the_client_leaves_and_its_caller_goes_on() -> None:
    caller = Caller(asyncio.Event().wait())  # type: ignore[arg-type]
    await asyncio.sleep(0)
    caller.leave.set()
    await asyncio.wait_for(caller.task, 10)
    assert caller.outcome == "left"
    assert caller.task.cancelling() == 0


async def test_what_work_returns_all_the_same_when_the_client_leaves_is_not_lost() -> None:
    async def work() -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "result"

    caller = Caller(work())
    await asyncio.sleep(0)
    caller.leave.set()
    await asyncio.wait_for(caller.task, 10)
    assert caller.outcome == "result"


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_caller_that_is_cancelled_itself_is_not_told_that_its_client_has_left(leaves: bool) -> None:
    caller = Caller(asyncio.Event().wait())  # type: ignore[arg-type]
    await asyncio.sleep(0)
    if leaves:
        caller.leave.set()
        await asyncio.sleep(0)
    caller.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(caller.task, 10)
    assert caller.outcome is None


async def test_a_client_that_leaves_after_the_work_is_done_disturbs_nobody() -> None:
    caller = Caller(asyncio.sleep(0, "result"))
    await caller.has_outcome.wait()
    caller.leave.set()
    await asyncio.wait_for(caller.task, 10)
    assert caller.outcome == "result"


async def test_a_client_that_leaves_in_the_turn_in_which_the_work_is_done_disturbs_nobody() -> None:
    done = asyncio.Event()

    async def work() -> str:
        await done.wait()
        return "result"

    caller = Caller(work())
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # both wait
    caller.leave.set()
    done.set()
    await asyncio.wait_for(caller.task, 10)
    assert caller.outcome in ("result", "left")
    assert caller.task.cancelling() == 0
