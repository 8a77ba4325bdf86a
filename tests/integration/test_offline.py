"""`from omni_server import Omni`, as a script uses it: nothing but the public surface."""

import asyncio
import logging
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from omni_server import Omni
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.types import (
    AudioDelta,
    AudioPart,
    ChatMessage,
    CodecDelta,
    Finished,
    ImagePart,
    OmniEvent,
    SamplingConfig,
    TextDelta,
    TextPart,
)
from tests.integration.live import queue_files

SAMPLES_PER_CODE = 480
GREEDY = {
    "thinker": SamplingConfig(temperature=0.0, max_tokens=20),
    "talker": SamplingConfig(temperature=0.0, max_tokens=60),
}
ENDLESS = {
    "thinker": SamplingConfig(max_tokens=3500, ignore_eos=True),
    "talker": SamplingConfig(max_tokens=3500, ignore_eos=True),
}


def engine_pids() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children() if child.name.startswith("EngineCore")}


@pytest.fixture(scope="module")
def omni(checkpoint: Path) -> Iterator[Omni]:
    """Leaving the block ends the engines and removes all that they shared."""
    # Those of other tests may still be ending.
    engines_before, files_before = engine_pids(), queue_files()
    with Omni(checkpoint, stage_config="qwen2_5_omni.demo-cpu") as omni:
        engines, files = engine_pids() - engines_before, queue_files() - files_before
        assert (len(engines), len(files)) == (3, 1)
        yield omni
    assert engines.isdisjoint(engine_pids())
    assert files.isdisjoint(queue_files())
    with pytest.raises(OmniError, match="closed"):
        omni.generate("Hello")
    omni.close()


def test_answer_has_text_tokens_codes_and_waveform(omni: Omni) -> None:
    answer = omni.generate("Hello, who are you?", sampling=GREEDY, seed=7)
    assert answer.text
    assert len(answer.token_ids) == answer.usage.text_tokens <= 20
    assert len(answer.codes) == answer.usage.codec_tokens <= 60
    assert answer.audio.dtype == np.float32
    assert answer.audio.shape == (SAMPLES_PER_CODE * len(answer.codes),)
    assert 0.01 < np.abs(answer.audio).max() <= 1
    assert answer.finish_reason in ("stop", "length")


def test_same_seed_gives_the_same_answer_and_another_voice_other_sound(omni: Omni) -> None:
    first, again = (omni.generate("Hello", sampling=GREEDY, seed=7) for _ in range(2))
    other = omni.generate("Hello", sampling=GREEDY, seed=7, voice="Ethan")
    assert (first.token_ids, first.codes) == (again.token_ids, again.codes)
    np.testing.assert_array_equal(first.audio, again.audio)
    assert other.token_ids == first.token_ids
    assert other.audio.tobytes() != first.audio.tobytes()


def test_text_only_has_no_sound(omni: Omni) -> None:
    picture = ImagePart(np.full((56, 84, 3), 200, np.uint8))
    messages = [ChatMessage("user", (picture, TextPart("What is this?")))]
    answer = omni.generate(messages, speech=False, sampling={"thinker": GREEDY["thinker"]})
    assert answer.text
    assert answer.codes == ()
    assert answer.audio.size == 0
    assert answer.usage.prompt.image > 0


async def test_stream_gives_typed_events_that_add_up_to_the_answer(omni: Omni) -> None:
    events: list[OmniEvent] = [event async for event in omni.stream("Hello", sampling=GREEDY, seed=7)]
    answer = omni.generate("Hello", sampling=GREEDY, seed=7)
    assert {type(event) for event in events} == {TextDelta, CodecDelta, AudioDelta, Finished}
    assert [isinstance(event, Finished) for event in events].index(True) == len(events) - 1
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == answer.text
    codes = [code for event in events if isinstance(event, CodecDelta) for code in event.codes]
    assert tuple(codes) == answer.codes
    pieces = [event for event in events if isinstance(event, AudioDelta)]
    starts = np.cumsum([0, *(len(piece.samples) for piece in pieces[:-1])])
    assert [piece.first_sample for piece in pieces] == starts.tolist()
    np.testing.assert_array_equal(np.concatenate([piece.samples for piece in pieces]), answer.audio)


async def test_leaving_the_stream_early_leaves_the_next_answer_alone(omni: Omni) -> None:
    before = omni.generate("Hello", sampling=GREEDY, seed=7)
    for _ in range(3):
        stream = omni.stream("Tell me a story", sampling=ENDLESS)
        async for event in stream:
            if isinstance(event, AudioDelta):
                break
        await stream.aclose()
    after = omni.generate("Hello", sampling=GREEDY, seed=7)
    assert after.codes == before.codes
    np.testing.assert_array_equal(after.audio, before.audio)


def test_a_loop_that_ends_in_the_middle_of_a_stream_is_left_in_peace(
    omni: Omni, caplog: pytest.LogCaptureFixture
) -> None:
    async def first_event() -> OmniEvent:
        async for event in omni.stream("Tell me a story", sampling=ENDLESS):
            return event
        raise AssertionError("no event")

    for _ in range(2):
        assert isinstance(asyncio.run(first_event()), TextDelta)
    assert omni.generate("Hello", sampling=GREEDY).audio.size > 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_unknown_voice_is_an_error_in_both_ways(omni: Omni) -> None:
    with pytest.raises(InvalidRequestError, match="voices are Chelsie, Ethan"):
        omni.generate("Hello", voice="nobody")
    with pytest.raises(InvalidRequestError, match="nobody"):
        async for _ in omni.stream("Hello", voice="nobody"):
            pass


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.full(16_000, np.nan, np.float32), "The audio has samples that are not finite numbers."),
        (np.array([0.0, np.inf] * 8_000, np.float32), "The audio has samples that are not finite numbers."),
        (np.full(30, 0.25, np.float32), "The audio is too short."),
        (np.zeros(0, np.float32), "The audio is too short."),
    ],
    ids=["not a number", "infinite", "short", "empty"],
)
def test_audio_that_the_model_cannot_take_is_an_error(
    omni: Omni, samples: npt.NDArray[np.float32], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as failure:
        omni.generate([ChatMessage("user", (AudioPart(samples, 16_000),))])
    assert (failure.value.message, failure.value.code) == (message, "invalid_audio")


async def test_chat_without_messages_is_an_error_in_both_ways(omni: Omni) -> None:
    with pytest.raises(InvalidRequestError, match="no messages"):
        omni.generate([])
    with pytest.raises(InvalidRequestError, match="no messages"):
        async for _ in omni.stream([]):
            pass
