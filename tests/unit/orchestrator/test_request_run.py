"""One request through fake stages: what comes out, and in what order."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import numpy as np
import pytest

from omni_server.config.pipeline import TokenFrames
from omni_server.family.speech_text import SpeechText
from omni_server.orchestrator.text_source import TextSource
from omni_server.orchestrator.tool_parser import ToolParser
from omni_server.types import (
    AudioDelta,
    CodecDelta,
    Finished,
    Flush,
    TextDelta,
)
from tests.unit.orchestrator.fake_stages import (
    CODES_PER_OUTPUT,
    FIRST_GENERATED,
    SAMPLES_PER_CODE,
    STOP_CODE,
    Stages,
    asked,
    collected,
    kinds,
    only,
    settle,
    sound_of,
    write,
)


@pytest.mark.parametrize("is_whole", [True, False])
async def test_the_talker_sends_what_a_window_needs_or_each_block_if_its_text_may_pause(
    *, is_whole: bool
) -> None:
    stages, events = asked()
    await settle()
    pieces = cast(AsyncIterator[str | Flush], None)
    source = TextSource(cast(SpeechText, None), pieces, is_whole=is_whole, on_later_text=lambda _: None)
    stages.audio.follow(source, is_aligned=False)
    await write(stages, 1)
    windows = tuple(blocks * CODES_PER_OUTPUT for blocks in (2, 1, 2, 4, 8))
    assert stages.talker.stream.tokens_per_output == (windows if is_whole else (CODES_PER_OUTPUT,))
    events.cancel()


async def test_text_and_speech_come_as_they_are_made() -> None:
    stages, events = asked()
    await settle()
    stages.token(0)
    await settle()
    stages.token(1)
    await settle()
    stages.talker.stream.send(1, 2)
    await settle()
    stages.token(2, finish="stop")
    await settle()
    stages.talker.stream.send(3, STOP_CODE, finish="stop")
    got = await events
    assert kinds(got) == [
        "TextDelta", "TextDelta", "CodecDelta", "AudioDelta",
        "TextDelta", "CodecDelta", "AudioDelta", "Finished",
    ]  # fmt: skip
    assert "".join(event.text for event in got if isinstance(event, TextDelta)) == "t0 t1 t2 "
    assert [event.codes for event in got if isinstance(event, CodecDelta)] == [(1, 2), (3,)]
    sounds = [event for event in got if isinstance(event, AudioDelta)]
    assert [sound.first_sample for sound in sounds] == [0, 2 * SAMPLES_PER_CODE]
    assert np.concatenate([sound.samples for sound in sounds]).tolist() == sound_of(1, 2, 3).tolist()
    finished = got[-1]
    assert isinstance(finished, Finished)
    assert finished.finish_reason == "stop"
    assert (finished.usage.text_tokens, finished.usage.codec_tokens) == (3, 3)
    assert stages.code2wav.request_ids == ["request-0", "request-1"]
    assert stages.is_released()


async def test_a_given_text_without_tokens_has_no_sound() -> None:
    stages, events = asked(reply=())
    await settle()
    stages.rows(num_generated=0)
    stages.thinker.stream.send(99, text="sampled", finish="length")
    got = await events
    assert kinds(got) == ["TextDelta", "Finished"]
    assert stages.is_released()


@pytest.mark.parametrize("turns", [1, 8])
async def test_spoken_requests_that_came_at_the_same_moment_reach_the_thinker_together(turns: int) -> None:
    """The first is turns of the event loop ahead, in which the second one's connection is accepted and its
    prompt is read; text waits for nobody."""
    first, second, text = Stages(), Stages(), Stages()
    runs = [first.run()]
    for _ in range(turns):
        await asyncio.sleep(0)
    runs += [second.run(), text.run(speech=False)]
    opened: list[Stages] = []
    for _ in range(40):
        opened += [
            stages for stages in (first, second, text) if stages.thinker.streams and stages not in opened
        ]
        await asyncio.sleep(0)
    assert opened == [text, first, second]
    for run in runs:
        await run.aclose()


async def test_an_output_without_tokens_is_no_event() -> None:
    stages, events = asked(speech=False)
    await settle()
    stages.thinker.stream.send()
    stages.thinker.stream.send(1, text="", finish=None)
    stages.thinker.stream.send(finish="stop")
    assert kinds(await events) == ["TextDelta", "Finished"]


async def test_a_reply_of_one_token_has_no_sound_and_releases_the_talker() -> None:
    stages, events = asked()
    await write(stages, 1)
    got = await asyncio.wait_for(events, 5)
    assert kinds(got) == ["TextDelta", "Finished"]
    assert stages.talker.stream.num_closed == 1
    assert all(feed.final_length is None for feed in stages.talker.stream.feeds), "it would start to speak"
    assert stages.is_released()


async def test_a_reply_of_one_token_by_length_is_incomplete() -> None:
    stages, events = asked()
    await settle()
    stages.token(0, finish="length")
    finished = (await asyncio.wait_for(events, 5))[-1]
    assert isinstance(finished, Finished)
    assert finished.finish_reason == "length"


async def test_a_talker_that_ends_first_does_not_end_the_text() -> None:
    stages, events = asked()
    await settle()
    for number in range(2):
        stages.token(number)
    await settle()
    stages.talker.stream.send(5, STOP_CODE, finish="stop")
    await settle()
    for number in range(2, 4):
        stages.token(number, finish="stop" if number == 3 else None)
        await settle()
    got = await asyncio.wait_for(events, 5)
    assert kinds(got).count("TextDelta") == 4
    assert stages.is_released()


async def test_a_stop_string_at_the_very_beginning_leaves_nothing_to_speak() -> None:
    stages, events = asked(detokenize=lambda ids: "STOP!"[: 2 * len(ids)])
    await settle()
    stages.rows(num_generated=0)
    stages.thinker.stream.send(100)
    stages.rows(num_generated=1)
    stages.thinker.stream.send(101, finish="stop")
    got = await asyncio.wait_for(events, 5)
    assert not {"CodecDelta", "AudioDelta"} & set(kinds(got))
    assert stages.is_released()


async def test_a_limit_on_the_length_keeps_the_last_frame() -> None:
    stages, events = asked(frames=TokenFrames(2, 1))
    await write(stages, 3)
    stages.talker.stream.send(1, 2, predicted=[[10], [20]], finish="length")
    await asyncio.wait_for(events, 5)
    assert stages.edge.frames == [(1, 10), (2, 20)]


async def test_rows_that_come_after_the_talker_has_ended_are_dropped() -> None:
    stages, events = asked()
    await settle()
    stages.token(0)
    stages.token(1)
    await settle()
    stages.talker.stream.send(5, STOP_CODE, finish="stop")
    await settle()
    stages.token(2)
    assert stages.dropped == stages.blocks[-1:]
    stages.token(3, finish="stop")
    await asyncio.wait_for(events, 5)
    assert stages.is_released()


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


async def test_what_is_said_before_a_call_is_spoken_and_nothing_else() -> None:
    stages = Stages()
    words = {100: "Hm", 101: ".", 102: "\n", 103: CALL, 104: "x", 105: ""}
    run = stages.run(detokenize=lambda ids: "".join(words[i] for i in ids), tool_parser=ToolParser())
    events = asyncio.create_task(collected(run))
    await settle()
    for number in range(6):
        stages.rows(num_generated=number)
        stages.thinker.stream.send(
            100 + number, text=words[100 + number], finish="stop" if number == 5 else None
        )
        await settle()
    assert stages.talker.stream.feeds[-1].final_length == FIRST_GENERATED + 2
    stages.talker.stream.send(1, 2, STOP_CODE, finish="stop")
    got = await events
    assert "".join(event.text for event in got if isinstance(event, TextDelta)) == "Hm."
    assert isinstance(only(AudioDelta, got), AudioDelta)
    assert stages.is_released()
