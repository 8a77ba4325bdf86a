"""A client that leaves ends its request everywhere."""

import asyncio

import pytest

from omni_server.api.config import ApiConfig
from omni_server.types import TextDelta
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import SPEECH, app_of, chat, post
from tests.unit.api.fake_generator import FakeGenerator, Hang

SPOKEN_STREAM = SPEECH | {"stream": True}


async def submission_to(generator: FakeGenerator) -> None:
    await asyncio.wait_for(generator.submitted.wait(), 10)


async def closing_by(generator: FakeGenerator) -> None:
    await asyncio.wait_for(generator.generations[0].closed.wait(), 10)


@pytest.mark.parametrize("fields", [{"stream": True}, SPOKEN_STREAM])
async def test_leaving_a_stream_closes_the_generation(fields: dict[str, object]) -> None:
    generator = FakeGenerator(script=[TextDelta("a", (1,)), Hang()])
    async with AsgiCall(app_of(generator), chat(**fields)) as call:
        await call.body_until(b'"a"')
        assert generator.generations[0].num_closed == 0
        call.leave()
        await closing_by(generator)


@pytest.mark.parametrize("fields", [{}, SPEECH])
async def test_leaving_before_the_whole_answer_closes_the_generation(fields: dict[str, object]) -> None:
    generator = FakeGenerator(script=[TextDelta("a", (1,)), Hang()])
    async with AsgiCall(app_of(generator), chat(**fields)) as call:
        await submission_to(generator)
        call.leave()
        await closing_by(generator)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_the_request_waits_for_admission_cancels_it(stream: bool) -> None:
    generator = FakeGenerator()
    generator.submit_hangs = True
    async with AsgiCall(app_of(generator), chat(stream=stream)):
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


async def test_next_request_works_after_one_was_left() -> None:
    generator = FakeGenerator(script=[Hang()])
    app = app_of(generator, ApiConfig())
    async with AsgiCall(app, chat(stream=True)) as call:
        await call.body_until(b"assistant")
    generator.script = None
    assert (await post(app, chat())).status_code == 200
