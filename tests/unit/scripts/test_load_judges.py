"""The load of scripts/abort_storm and soak notices what goes wrong: on a server whose model follows a
script."""

import asyncio
import json
from collections.abc import Sequence
from urllib.parse import urlsplit

import numpy as np
import pytest

from omni_server.errors import StageDeadError
from omni_server.types import AudioDelta, TextDelta
from tests.integration.test_server import STREAM
from tests.load.answers import Answer
from tests.load.mixed_load import Faults, MixedLoad, alone, times
from tests.load.tally import Tally
from tests.load.wire import Ask, Cut, exchange
from tests.unit.api.clients import SPEECH, URL, chat
from tests.unit.api.fake_generator import Hang, ScriptEntry, finished
from tests.unit.api.test_server import Life, served

SOUND = np.full(6000, 0.25, np.float32)
WAV = SPEECH | {"audio": {"voice": "Ethan", "format": "pcm16"}}
ASKS = [
    Ask("text", URL, "application/json", json.dumps(chat()).encode()),
    Ask("text, streamed", URL, "application/json", json.dumps(chat(**STREAM)).encode()),
    Ask("speech", URL, "application/json", json.dumps(chat(**WAV)).encode()),
    Ask("speech, streamed", URL, "application/json", json.dumps(chat(**WAV, **STREAM)).encode(), b'"data":"'),
]


def script(text: str = "Hello", *, louder: float = 0.0) -> list[ScriptEntry]:
    return [TextDelta(text, (1,)), AudioDelta(0, SOUND + np.float32(louder)), finished(codec_tokens=12)]


def port_of(life: Life) -> int:
    port = urlsplit(life.address).port
    assert port is not None
    return port


async def loaded(life: Life, wanted: dict[Ask, Answer], **options: object) -> Tally:
    load = MixedLoad(port_of(life), wanted, abort_share=0.0, seed=1, **options)  # type: ignore[arg-type]
    return await asyncio.wait_for(load.run(4, times(20)), 30)


async def test_the_same_answers_are_exact_up_to_rounding() -> None:
    life = Life()
    life.generator.script = script()
    async with served(life):
        wanted = await alone(port_of(life), ASKS)
        life.generator.script = script(louder=1 / 40_000)
        tally = await loaded(life, wanted)
    assert (tally.sent, tally.exact, tally.accounted) == (20, 20, 20)
    assert tally.is_clean


@pytest.mark.parametrize(
    ("changed", "kinds"),
    [
        (script("Hallo"), {"text", "speech"}),
        (script(louder=1 / 5000), {"speech"}),
        ([*script()[:1], AudioDelta(0, SOUND[:-1]), finished(codec_tokens=12)], {"speech"}),
        ([*script()[:2], finished("length", codec_tokens=12)], {"text", "speech"}),
        ([script()[0], StageDeadError("talker", "gone")], {"text", "speech"}),
    ],
    ids=["text", "sound", "shorter", "reason", "error"],
)
async def test_another_answer_is_wrong(changed: Sequence[ScriptEntry], kinds: set[str]) -> None:
    life = Life()
    life.generator.script = script()
    async with served(life):
        wanted = await alone(port_of(life), ASKS)
        life.generator.script = changed
        tally = await loaded(life, wanted)
    assert tally.accounted == tally.sent == 20
    assert tally.wrong
    assert {problem.partition("(")[2].partition(")")[0].partition(",")[0] for problem in tally.wrong} == kinds


async def test_the_error_of_a_dead_stage_is_excused_while_one_is_down_and_only_then() -> None:
    life = Life()
    life.generator.script = script()
    async with served(life):
        wanted = await alone(port_of(life), ASKS[:1])
        life.generator.script = [StageDeadError("talker", "gone")]
        down = await loaded(life, wanted, faults=Faults([(0.0, float("inf"))]))
        up = await loaded(life, wanted, faults=Faults([(0.0, 1.0)]))
    assert down.is_clean
    assert down.excused == {"engine_dead": 20}
    assert len(up.wrong) == 20


async def test_an_answer_that_never_ends_is_cut_where_the_client_leaves() -> None:
    life = Life()
    life.generator.script = [TextDelta("Hello", (1,)), Hang()]
    async with served(life):
        for sent_share, is_reset in ((1.0, False), (1.0, True), (0.5, False), (0.5, True)):
            reply = await exchange(port_of(life), ASKS[1], "leaves", 10, Cut(sent_share, 0.2, is_reset))
            assert reply.was_cut
            assert not reply.is_whole
        assert len(life.generator.generations) == 2, "half a request begins nothing"
        await asyncio.wait_for(
            asyncio.gather(*(made.closed.wait() for made in life.generator.generations)), 10
        )
        with pytest.raises(TimeoutError):
            await exchange(port_of(life), ASKS[1], "waits", 0.2)
