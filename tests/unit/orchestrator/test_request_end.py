"""Ends of a request other than its answer: failures, deadlines and aborts, and what is released."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import numpy.typing as npt
import pytest

from omni_server.errors import (
    CorruptDataError,
    EndlessSpeechError,
    InvalidRequestError,
    OmniError,
    StageError,
)
from omni_server.types import AudioDelta, Finished, OmniEvent
from tests.unit.orchestrator.fake_stages import (
    STOP_CODE,
    Stages,
    asked,
    collected,
    kinds,
    only,
    settle,
    write,
)

# -- failures


async def fails_with(events: "asyncio.Task[list[OmniEvent]]", kind: type[OmniError], message: str) -> None:
    with pytest.raises(kind, match=message):
        await asyncio.wait_for(events, 5)


async def test_an_error_in_the_thinker_ends_all_stages_and_is_raised_once() -> None:
    stages = Stages()
    run = stages.run()
    events = asyncio.create_task(collected(run))
    await settle()
    stages.token(0)
    stages.token(1)
    await settle()
    stages.talker.stream.send(1, 2)
    stages.code2wav.gate.clear()
    await settle()
    stages.thinker.stream.fail(StageError("thinker", "broken"))
    await fails_with(events, StageError, "stage 'thinker': broken")
    assert stages.is_released()
    assert [event async for event in run] == []


@pytest.mark.parametrize(
    ("sound", "kind"),
    [
        (np.zeros(20), "flat"),
        (np.full(20, 0.25), "flat"),
        (np.linspace(-1.5, 1, 20), "samples"),
        (np.full(20, np.nan), "samples"),
        (np.r_[np.linspace(-1, 1, 19), np.nan], "samples"),
        (np.r_[np.linspace(-1, 1, 19), -np.inf], "samples"),
        (np.tile([-1.0, 1.0], 10), "clipped"),
        (np.linspace(-1, 1, 20).reshape(2, 10), "shape"),
        (np.linspace(-1, 1, 21), "shape"),
        (np.zeros(0), "shape"),
    ],
    ids=[
        "silent",
        "constant",
        "too loud",
        "NaN",
        "one NaN",
        "one infinity",
        "clipped",
        "2-d",
        "too long",
        "empty",
    ],
)
async def test_sound_that_cannot_be_right_is_an_error_and_counted(
    sound: npt.NDArray[np.float64], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    stages = Stages()
    stages.code2wav.sound = sound.astype(np.float32)
    events = asyncio.create_task(collected(stages.run()))
    await write(stages, 3)
    stages.talker.stream.send(1, 2)
    await fails_with(events, CorruptDataError, rf"stage 'code2wav': corrupt data \({kind}\): ")
    assert stages.is_released()
    assert [(error.stage, error.kind) for error in stages.corrupt] == [("code2wav", kind)]
    assert [record.getMessage() for record in caplog.records] == [
        f"request request: {stages.corrupt[0].message}"
    ]


@pytest.mark.parametrize("num_samples", [0, -1])
async def test_audio_that_does_not_fit_a_window_without_samples_is_an_error(num_samples: int) -> None:
    stages = Stages()
    stages.edge.num_samples = num_samples
    events = asyncio.create_task(collected(stages.run()))
    await write(stages, 3)
    stages.talker.stream.send(1, 2)
    await fails_with(events, CorruptDataError, rf"20 samples where {num_samples} were asked for")
    assert stages.is_released()


async def test_a_window_without_samples_adds_nothing_to_the_audio() -> None:
    stages = Stages()
    stages.edge.num_samples = 0
    stages.code2wav.sound = np.zeros(0, np.float32)
    events = asyncio.create_task(collected(stages.run()))
    await write(stages, 3)
    stages.talker.stream.send(1, 2)
    await settle()
    # The next one has the samples of both.
    stages.edge.num_samples, stages.edge.misplaced_by = 40, -20
    stages.code2wav.sound = np.linspace(0, 0.9, 40, dtype=np.float32)
    stages.talker.stream.send(3, 4, STOP_CODE, finish="stop")
    delta = only(AudioDelta, await events)
    assert isinstance(delta, AudioDelta)
    assert np.array_equal(delta.samples, stages.code2wav.sound)
    assert stages.is_released()


async def test_silence_of_one_code_and_sound_that_peaks_at_full_scale_are_sound() -> None:
    for codes, sound in (((7, 7), np.zeros(20)), ((7, 8), np.r_[np.ones(10), np.linspace(0, 0.9, 10)])):
        stages = Stages()
        stages.code2wav.sound = sound.astype(np.float32)
        events = asyncio.create_task(collected(stages.run()))
        await write(stages, 3)
        stages.talker.stream.send(*codes, STOP_CODE, finish="stop")
        delta = only(AudioDelta, await events)
        assert isinstance(delta, AudioDelta)
        assert np.array_equal(delta.samples, stages.code2wav.sound)
        assert stages.corrupt == []


@pytest.mark.parametrize("misplaced_by", [20, -20], ids=["missing", "twice"])
async def test_windows_that_do_not_follow_each_other_are_an_error_at_once(misplaced_by: int) -> None:
    stages, events = asked()
    await write(stages, 5)
    stages.talker.stream.send(1, 2)
    await settle()
    stages.edge.misplaced_by = misplaced_by
    stages.talker.stream.send(3, 4)
    first = 20 + misplaced_by
    await fails_with(
        events, CorruptDataError, rf"\(window_sequence\): a window from sample {first} on, where 20 is"
    )
    assert stages.is_released()


async def test_last_window_that_does_not_come_is_an_error_and_not_a_shorter_answer() -> None:
    stages = Stages()
    stages.edge.keeps_the_rest = True
    events = asyncio.create_task(collected(stages.run()))
    await write(stages, 5)
    stages.talker.stream.send(1, 2, 3, finish="length")
    await fails_with(
        events,
        CorruptDataError,
        r"\(window_sequence\): the windows end at sample 20, the frames at sample 30",
    )
    assert stages.is_released()


async def test_speech_that_must_end_fails_at_its_limit() -> None:
    stages, events = asked(must_end=True)
    await write(stages, 5)
    stages.talker.stream.send(1, 2, 3, finish="length")
    await fails_with(events, EndlessSpeechError, "stage 'talker': the speech has not ended")
    assert stages.is_released()


@pytest.mark.parametrize(
    "outputs", [((1, 2), (3, 4)), ((1, 2, 3, 4, 5),), ((1, 2, 3, 4, STOP_CODE),)], ids=str
)
async def test_speech_is_cut_at_the_length_that_its_text_allows(outputs: tuple[tuple[int, ...], ...]) -> None:
    """However many steps an output has."""
    stages, events = asked()
    await write(stages, 5)
    stages.audio.limit(4)
    for codes in outputs:
        stages.talker.stream.send(*codes, finish="stop" if STOP_CODE in codes else None)
    finished = (await asyncio.wait_for(events, 5))[-1]
    assert isinstance(finished, Finished)
    assert (finished.finish_reason, finished.usage.codec_tokens) == ("length", 4)
    assert stages.edge.frames == [(1,), (2,), (3,), (4,)]
    assert stages.is_released()


async def test_rows_missing_at_the_end_are_an_error_and_not_a_wait_without_end() -> None:
    stages, events = asked()
    await settle()
    stages.token(0)
    stages.thinker.stream.send(101, 102, finish="stop")  # the row of token 0 and 1 never came
    await fails_with(
        events, CorruptDataError, r"stage 'thinker': corrupt data \(row_sequence\): 0 rows for 2 tokens"
    )
    assert stages.is_released()


async def test_a_talker_that_refuses_the_request_keeps_no_rows() -> None:
    stages = Stages()
    stages.talker.open_error = InvalidRequestError("top_k is too large")
    events = asyncio.create_task(collected(stages.run()))
    await settle()
    stages.token(0)
    await fails_with(events, InvalidRequestError, "top_k")
    assert stages.is_released(), "a slot of the queue would stay in use for ever"


async def test_an_unexpected_error_says_nothing_of_its_inside() -> None:
    stages, events = asked()
    await settle()
    stages.token(0)
    stages.thinker.stream.fail(RuntimeError("/home/somebody/secret.py line 7"))
    await fails_with(events, OmniError, "^internal error$")
    assert stages.is_released()


# -- a stage that goes down


async def test_stages_that_are_up_again_when_they_are_needed_fail_nothing() -> None:
    stages, events = asked()
    await settle()
    for one in (stages.talker, stages.code2wav):
        one.life.went_down("its engine process was killed")
        one.life.came_up()
    await write(stages, 3)
    stages.talker.stream.send(1, 2, STOP_CODE, finish="stop")
    assert kinds(await asyncio.wait_for(events, 5))[-1] == "Finished"
    assert stages.is_released()


# -- deadline and abort


async def nothing(stages: Stages) -> None:
    """Before the request's task has begun."""


async def opened(stages: Stages) -> None:
    await settle()


async def prompt_rows_came(stages: Stages) -> None:
    await settle()
    stages.rows(num_generated=0)
    await settle()


async def rows_not_yet_taken(stages: Stages) -> None:
    await settle()
    stages.rows(num_generated=0)
    stages.rows(num_generated=1)


async def speaking(stages: Stages) -> None:
    await settle()
    for number in range(3):
        stages.token(number)
    await settle()
    stages.talker.stream.send(1)
    await settle()


async def making_sound(stages: Stages) -> None:
    stages.code2wav.gate.clear()
    await speaking(stages)
    stages.talker.stream.send(2)
    await settle()
    assert stages.code2wav.running == 1


async def text_done(stages: Stages) -> None:
    await write(stages, 3)


async def opening_the_talker(stages: Stages) -> None:
    stages.talker.open_gate.clear()
    await write(stages, 3)


async def feeding(stages: Stages) -> None:
    """The feed has been handed to the outbox, which has not sent it."""
    await settle()
    stages.token(0)
    await settle()
    stages.token(1)


async def finished(stages: Stages) -> None:
    await write(stages, 3)
    stages.talker.stream.send(1, STOP_CODE, finish="stop")
    await settle()
    assert stages.ended == ["request"]


PHASES = [
    nothing, opened, prompt_rows_came, rows_not_yet_taken, opening_the_talker, feeding, speaking, making_sound,
    text_done, finished,
]  # fmt: skip


@pytest.mark.parametrize("phase", PHASES)
async def test_an_abort_releases_everything(phase: Callable[[Stages], Awaitable[None]]) -> None:
    stages = Stages()
    run = stages.run()
    await phase(stages)
    await run.aclose()
    await settle()
    assert stages.is_released()
    await run.aclose()
    assert stages.is_released(), "closing again is harmless"


@pytest.mark.parametrize("phase", PHASES)
async def test_a_consumer_that_is_cancelled_releases_everything(
    phase: Callable[[Stages], Awaitable[None]],
) -> None:
    stages, events = asked()
    await phase(stages)
    events.cancel()
    await asyncio.wait([events])
    await settle()
    if phase is not nothing:  # it was cancelled before it held the request
        assert stages.is_released()


@pytest.mark.parametrize("phase", PHASES[:-1])
async def test_an_abort_from_elsewhere_wakes_the_consumer(phase: Callable[[Stages], Awaitable[None]]) -> None:
    """As the server does when it shuts down."""
    stages = Stages()
    run = stages.run()
    events = asyncio.create_task(collected(run))
    await phase(stages)
    await run.aclose()
    await fails_with(events, OmniError, "was ended before it was finished")
    assert stages.is_released()
