"""Stages with several replicas: which engine a request is bound to, what fails when one dies, and how one is
drained."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from omni_server.config.stage_config import StageConfig
from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import Stage
from omni_server.errors import StageDeadError, StageDownError
from omni_server.family import FamilyModel
from omni_server.family.codec import CodecLayout
from omni_server.orchestrator.orchestrator import Orchestrator
from omni_server.protocol.rows import RowsPayload, Segment, SharedBlock
from omni_server.types import Finished, OmniEvent
from tests.unit.orchestrator.fake_stages import (
    CODES_PER_WINDOW,
    SAMPLES_PER_CODE,
    FakeCode2Wav,
    FakeStream,
    ReadRun,
    collected,
    kinds,
    settle,
    submit,
)
from tests.unit.orchestrator.test_orchestrator import FAMILY, MAX_MODEL_LEN, FakeEntry, FakeFamily, request

STOP = 2
"""The talker's stop token in `FakeFamily`."""


class Family(FakeFamily):
    codec = CodecLayout(CODES_PER_WINDOW, SAMPLES_PER_CODE)


@dataclass
class Spoken:
    """A spoken request, on its way through one stream of each language model."""

    run: ReadRun
    thinker: FakeStream
    num_prompt: int
    events: asyncio.Task[list[OmniEvent]] = field(init=False)

    def __post_init__(self) -> None:
        self.events = asyncio.create_task(collected(self.run))

    async def send_rows(self) -> None:
        """Those of the prompt: the talker is needed."""
        sink = self.thinker.row_sink
        assert sink is not None
        block, rows = SharedBlock(0, 1, 0), (Segment(0, self.num_prompt + 1, 0),)
        sink(RowsPayload(self.num_prompt, 0, 4, "float32", block, rows))
        await settle()

    async def write(self) -> None:
        """One token."""
        sink = self.thinker.row_sink
        assert sink is not None
        block, rows = SharedBlock(1, 1, 0), (Segment(self.num_prompt + 1, 1, 0),)
        sink(RowsPayload(self.num_prompt, 1, 4, "float32", block, rows))
        self.thinker.send(100, text="a")
        self.thinker.send(1, finish="stop")
        await settle()

    async def end(self) -> None:
        await self.run.aclose()
        await asyncio.gather(self.events, return_exceptions=True)


class Replicas:
    """One thinker, two talkers and two decoders, unless the counts say otherwise."""

    def __init__(self, thinkers: int = 1, talkers: int = 2, decoders: int = 2) -> None:
        self.thinkers = [FakeEntry(name) for name in _names("thinker", thinkers)]
        self.talkers = [FakeEntry(name) for name in _names("talker", talkers)]
        self.decoders = [FakeCode2Wav(name) for name in _names("code2wav", decoders)]
        stages: dict[str, Any] = {
            "thinker": {"max_model_len": MAX_MODEL_LEN, "replicas": thinkers},
            "talker": {"max_model_len": MAX_MODEL_LEN, "replicas": talkers},
            "code2wav": {"max_model_len": 2048, "replicas": decoders},
        }
        edges = [
            {"from": "thinker", "to": "talker"},
            {"from": "talker", "to": "code2wav", "chunks": {"mode": "whole"}},
        ]
        document = {"model_family": FAMILY, "platform": "cpu", "stages": stages, "edges": edges}
        self.orchestrator = Orchestrator(
            cast(FamilyModel, Family()),
            StageConfig.model_validate(document),
            ar={
                "thinker": Stage("thinker", [cast(ArHandle, one) for one in self.thinkers]),
                "talker": Stage("talker", [cast(ArHandle, one) for one in self.talkers]),
            },
            diffusion={"code2wav": Stage("code2wav", [cast(DiffusionHandle, one) for one in self.decoders])},
            request_timeout_s=30.0,
        )
        self._num_spoken = 0

    async def speak(self, pinned_engine: FakeEntry | FakeCode2Wav | None = None) -> Spoken:
        before = {id(stream) for one in self.thinkers for stream in one.streams}
        self._num_spoken += 1
        run = await submit(self.orchestrator, request(f"r{self._num_spoken}"), cast(Any, pinned_engine))
        await settle()
        (stream,) = (s for one in self.thinkers for s in one.streams if id(s) not in before)
        return Spoken(run, stream, len(self.thinkers[0].prompt))

    def loads(self) -> list[list[int]]:
        """The requests of the thinkers, talkers and decoders."""
        return [[one.num_requests for one in stage] for stage in (self.thinkers, self.talkers, self.decoders)]


def _names(stage: str, count: int) -> list[str]:
    return [stage] if count == 1 else [f"{stage}/{number}" for number in range(count)]


# -- which engine


async def test_a_new_request_goes_to_the_engine_with_the_fewest_whose_turn_it_is_not() -> None:
    replicas = Replicas()
    requests = [await replicas.speak() for _ in range(3)]
    for one in requests:
        await one.send_rows()
    assert replicas.loads()[1] == [2, 1]
    for number in (0, 2):  # both on the first talker
        await requests[number].end()
    assert replicas.loads()[1] == [0, 1]
    await (await replicas.speak()).send_rows()
    assert replicas.loads()[1] == [1, 1], "it is the second one's turn"


async def test_a_request_stays_with_its_engines_to_its_end() -> None:
    replicas = Replicas()
    first, second = await replicas.speak(), await replicas.speak()
    for one in (first, second):
        await one.send_rows()
        await one.write()
    for number, talker in enumerate(replicas.talkers):
        (stream,) = talker.streams
        assert len(stream.feeds) == 3, "rows of the prompt, of the token, and the end of the text"
        stream.send(10 + number, 20 + number)
        await settle()
    for number, talker in enumerate(replicas.talkers):
        talker.stream.send(30 + number, STOP, finish="stop")
    answers = [await asyncio.wait_for(one.events, 5) for one in (first, second)]
    assert [kinds(answer)[-1] for answer in answers] == ["Finished", "Finished"]
    for decoder, name in zip(replicas.decoders, ("r1", "r2"), strict=True):
        assert {window.split("-")[0] for window in decoder.request_ids} == {name}
    for number, answer in enumerate(answers):
        finished = answer[-1]
        assert isinstance(finished, Finished)
        found = {stage: times.replica for stage, times in finished.times.items()}
        assert found == {"thinker": None, "talker": number, "code2wav": number}
    assert replicas.loads() == [[0], [0, 0], [0, 0]]


async def test_a_warm_up_goes_through_the_engine_that_it_is_for() -> None:
    replicas = Replicas()
    for _ in range(2):
        one = await replicas.speak(pinned_engine=replicas.talkers[1])
        await one.send_rows()
    assert replicas.loads()[1] == [0, 2]


async def test_a_request_whose_prompt_is_refused_leaves_its_engine() -> None:
    replicas = Replicas(thinkers=2)
    replicas.thinkers[0].max_chars = 0
    with pytest.raises(Exception, match="too long"):
        await replicas.speak()
    assert replicas.loads()[0] == [0, 0]


# -- death


async def test_a_dead_engine_fails_its_own_requests_and_others_take_the_next() -> None:
    replicas = Replicas()
    first, second = await replicas.speak(), await replicas.speak()
    for one in (first, second):
        await one.send_rows()
    replicas.talkers[0].life.went_down("its engine process was killed")
    with pytest.raises(StageDeadError, match="stage 'talker/0': its engine process was killed"):
        await asyncio.wait_for(first.events, 5)
    assert replicas.loads() == [[1], [0, 1], [0, 0]]
    third = await replicas.speak()
    await third.send_rows()
    assert replicas.loads() == [[2], [0, 2], [0, 0]]
    replicas.talkers[0].life.came_up()
    fourth = await replicas.speak()
    await fourth.send_rows()
    assert replicas.loads() == [[3], [1, 2], [0, 0]]
    assert not second.events.done()
    for one in (second, third, fourth):
        await one.end()


async def test_a_stage_is_down_when_no_engine_of_it_is_up() -> None:
    replicas = Replicas()
    replicas.talkers[0].life.went_down("killed")
    assert replicas.orchestrator.stage_down() is None
    replicas.talkers[1].life.went_down("killed")
    down = replicas.orchestrator.stage_down()
    assert down is not None
    assert (down.stage, down.code) == ("talker", "talker_down")
    with pytest.raises(StageDownError):
        await submit(replicas.orchestrator, request())


# -- an engine that is to be replaced


async def test_an_engine_that_is_drained_keeps_its_requests_and_gets_no_others() -> None:
    replicas = Replicas()
    first = await replicas.speak()
    await first.send_rows()
    replicas.talkers[0].is_draining = True
    others = [await replicas.speak() for _ in range(3)]
    for one in others:
        await one.send_rows()
    assert replicas.loads()[1] == [1, 3]
    await first.write()
    replicas.talkers[0].stream.send(11, 12, STOP, finish="stop")
    assert kinds(await asyncio.wait_for(first.events, 5))[-1] == "Finished"
    assert replicas.loads()[1] == [0, 3]
    for one in others:
        await one.end()


async def test_an_engine_that_is_drained_serves_where_no_other_is_up() -> None:
    replicas = Replicas()
    replicas.talkers[0].is_draining = True
    replicas.talkers[1].life.went_down("killed")
    one = await replicas.speak()
    await one.send_rows()
    assert replicas.loads()[1] == [1, 0]
    await one.end()
