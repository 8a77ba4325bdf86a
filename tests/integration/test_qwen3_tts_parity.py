"""Speech of Qwen3-TTS equals the reference's: greedy, float32, on the same weights."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fastapi import FastAPI

from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.check.default_config import load_for
from omni_server.config.load import find_shipped_config
from omni_server.errors import DeadlineExceededError
from omni_server.offline import OmniOutput, collect
from omni_server.orchestrator.text_source import in_one_piece
from omni_server.types import (
    AudioDelta,
    ClonedVoice,
    CodecDelta,
    OmniEvent,
    OmniRequest,
    SamplingConfig,
    SpeechOutput,
    TextAlignment,
)
from omni_server.verify.compare import signal_to_noise_db
from tests.integration.live import LiveOmni, changed_config
from tests.integration.parity import QWEN3_WAVEFORM_SNR_DB
from tests.reference.qwen3_tts import Qwen3TTSReference, Spoken
from tests.reference.qwen3_tts_cases import CASES, TTSCase
from tests.spoken_texts import TEXTS
from tests.unit.api.speech_client import SpeechClient

CHECKPOINTS = sorted({case.checkpoint for case in CASES.values()})
CONFIG = load_for(find_shipped_config("qwen3_tts.demo-cpu"), {"audio"})


@dataclass(frozen=True)
class Served:
    live: LiveOmni
    width: int
    """Of the talker."""
    cases: list[TTSCase]
    wanted: dict[str, Spoken]

    @classmethod
    def of(cls, live: LiveOmni, folder: Path, wanted: dict[str, Spoken]) -> "Served":
        config = json.loads((folder / "config.json").read_text())["talker_config"]
        cases = [case for case in CASES.values() if case.checkpoint == folder.name and not case.min_frames]
        return cls(live, config["hidden_size"], cases, wanted)

    def request(
        self, case: TTSCase, number: int = 0, pieces: AsyncIterator[str] | None = None
    ) -> OmniRequest:
        clone = None
        if case.clone is not None:
            codes = np.array(case.clone.codes(), np.int16)
            vector = np.array(case.clone.vector(self.width), np.float32)
            clone = ClonedVoice(vector.tobytes(), codes.tobytes(), case.clone.text)
        speech = SpeechOutput(
            voice=None if case.voice is None else case.voice.capitalize(),
            text=case.text if pieces is None else None,
            pieces=pieces,
            language=case.language,
            instructions=case.instructions,
            text_first=not case.streams_text,
            clone=clone,
        )
        sampling = SamplingConfig(
            temperature=0.0, min_tokens=case.min_frames or None, max_tokens=case.max_frames
        )
        return OmniRequest(f"{case.name}-{number}", (), speech, {"talker": sampling})

    def check(self, case: TTSCase, answer: OmniOutput) -> None:
        want = self.wanted[case.name]
        np.testing.assert_array_equal(np.reshape(answer.codes, (-1, 16)), want.codes, err_msg=case.name)
        assert answer.finish_reason == ("stop" if want.has_ended else "length"), case.name
        assert signal_to_noise_db(want.waveform, answer.audio) > QWEN3_WAVEFORM_SNR_DB, case.name


async def in_pieces(text: str, seed: int) -> AsyncIterator[str]:
    """While it is written: up to seven characters at a time, slower than they are spoken or faster."""
    random = np.random.default_rng(seed)
    while text:
        length, pause_s = int(random.integers(1, 8)), float(random.choice([0, 0.001, 0.02]))
        yield text[:length]
        text = text[length:]
        await asyncio.sleep(pause_s)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def served(
    request: pytest.FixtureRequest, qwen3_tts_checkpoints: Path, qwen3_tts_reference: Qwen3TTSReference
) -> Iterator[Served]:
    wanted = qwen3_tts_reference.answers_of(CASES.values())
    folder = qwen3_tts_checkpoints / request.param
    live = LiveOmni(folder, CONFIG)
    try:
        yield Served.of(live, folder, wanted)
    finally:
        live.close()


def test_speech_equals_the_reference_alone_while_it_is_written_and_together(served: Served) -> None:
    for case in served.cases:
        served.check(case, served.live.answer(served.request(case)))
        if case.streams_text:
            pieces = in_pieces(case.text, len(served.cases))
            served.check(case, served.live.answer(served.request(case, pieces=pieces)))
    requests = [served.request(case) for case in served.cases]
    for case, answer in zip(served.cases, served.live.answers(requests), strict=True):
        served.check(case, answer)
    assert served.live.held_rows() == 0


@pytest.mark.parametrize("served", CHECKPOINTS[:1], indirect=True)
def test_a_deadline_ends_the_request_everywhere_and_tells_the_caller(served: Served) -> None:
    case = served.cases[0]
    endless = {"talker": SamplingConfig(max_tokens=1000, ignore_eos=True)}
    with pytest.raises(DeadlineExceededError):
        served.live.answer(replace(served.request(case, 2), sampling=endless, deadline_s=0.5))
    assert served.live.held_rows() == 0
    served.check(case, served.live.answer(served.request(case)))


def test_preempted_requests_go_on_as_the_reference(
    qwen3_tts_checkpoints: Path, qwen3_tts_reference: Qwen3TTSReference
) -> None:
    """The KV cache has room for one or two requests."""
    wanted = qwen3_tts_reference.answers_of(CASES.values())
    folder = qwen3_tts_checkpoints / CASES["x_vector"].checkpoint
    few_blocks = {"max_model_len": 256, "engine_args": {"num_gpu_blocks_override": 9}}
    live = LiveOmni(folder, changed_config(CONFIG, stages={"talker": few_blocks}))
    try:
        served = Served.of(live, folder, wanted)
        requests = [served.request(case) for case in served.cases]
        answers = live.answers_at_once(requests, ["talker"])
        for case, answer in zip(served.cases, answers, strict=True):
            served.check(case, answer)
        assert live.num_resumed()["talker"] > 0
    finally:
        live.close()


@pytest.fixture(scope="module")
def two_seats(qwen3_tts_checkpoints: Path, qwen3_tts_reference: Qwen3TTSReference) -> Iterator[Served]:
    wanted = qwen3_tts_reference.answers_of(CASES.values())
    folder = qwen3_tts_checkpoints / "tiny.custom_voice"
    live = LiveOmni(folder, changed_config(CONFIG, stages={"talker": {"max_num_seqs": 2}}))
    try:
        yield Served.of(live, folder, wanted)
    finally:
        live.close()


def test_texts_that_are_not_continued_are_preempted_for_others(two_seats: Served) -> None:
    """Both running requests have texts that go on only once a third has been spoken."""
    case = CASES["short_streamed"]

    async def overtaken() -> list[OmniOutput]:
        may_continue = asyncio.Event()

        async def stalled() -> AsyncIterator[str]:
            yield case.text[:20]
            await may_continue.wait()
            yield case.text[20:]

        waiting = [two_seats.request(case, number, stalled()) for number in range(2)]
        answers = [asyncio.create_task(collect(two_seats.live.omni, request)) for request in waiting]
        while two_seats.live.omni.num_running < 2:  # noqa: ASYNC110 - there is nothing to wait for
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # they speak what there is
        other = await collect(two_seats.live.omni, two_seats.request(case, 2))
        may_continue.set()
        return [other, *await asyncio.gather(*answers)]

    for answer in two_seats.live.run(overtaken()):
        two_seats.check(case, answer)
    assert two_seats.live.num_resumed()["talker"] == 1


def in_words(text: str) -> list[str]:
    return re.findall(r"\S+\s*|\s+", text)


def in_short_pieces(text: str, random: np.random.Generator) -> list[str]:
    pieces = []
    while text:
        length = int(random.integers(1, 8))
        pieces.append(text[:length])
        text = text[length:]
    return pieces


async def written(pieces: Sequence[str], random: np.random.Generator) -> AsyncIterator[str]:
    """With a pause so long that a request that waits is preempted for others."""
    first, *others = pieces
    yield first
    for number, piece in enumerate(others):
        await asyncio.sleep(0.4 if number == 1 else float(random.choice([0, 0.002, 0.01])))
        yield piece


def test_forty_texts_in_any_pieces_are_spoken_as_at_once_alone_and_eight_together(two_seats: Served) -> None:
    """Eight share two seats, and are preempted where their texts pause."""
    omni, random = two_seats.live.omni, np.random.default_rng(0)
    greedy = {"talker": SamplingConfig(temperature=0.0, max_tokens=12)}

    def spoken(
        number: int, kind: str, pieces: AsyncIterator[str] | None
    ) -> Coroutine[None, None, OmniOutput]:
        text = TEXTS[number] if pieces is None else None
        speech = SpeechOutput(voice="Vivian", text=text, pieces=pieces, text_first=False)
        return collect(omni, OmniRequest(f"{kind}-{number}", (), speech, greedy))

    async def eight(begin: int, kind: str, split: Callable[[str], Sequence[str]]) -> list[OmniOutput]:
        numbers = range(begin, begin + 8)
        texts = [written(split(TEXTS[number]), random) for number in numbers]
        return await asyncio.gather(*map(spoken, numbers, [kind] * 8, texts))

    num_resumed = two_seats.live.num_resumed()["talker"]
    wanted = [two_seats.live.run(spoken(number, "whole", None)) for number in range(len(TEXTS))]
    for begin in range(0, len(TEXTS), 8):
        for kind, split in (
            ("words", in_words) if begin % 16 else ("once", lambda text: [text]),
            ("pieces", partial(in_short_pieces, random=random)),
        ):
            answers = two_seats.live.run(eight(begin, kind, split))
            for answer, want in zip(answers, wanted[begin : begin + 8], strict=True):
                assert answer.codes == want.codes, kind
                assert signal_to_noise_db(want.audio, answer.audio) > QWEN3_WAVEFORM_SNR_DB
    assert two_seats.live.num_resumed()["talker"] > num_resumed
    assert two_seats.live.held_rows() == 0


def test_a_word_is_reported_with_the_first_frame_that_depends_on_it(two_seats: Served) -> None:
    text, changed = "one two three four", "one two green four"
    greedy = {"talker": SamplingConfig(temperature=0.0, max_tokens=30, ignore_eos=True)}

    def events_of(text: str) -> list[OmniEvent]:
        speech = SpeechOutput(voice="Vivian", pieces=in_one_piece(text), is_aligned=True)
        return two_seats.live.events(OmniRequest("aligned", (), speech, greedy))

    frames = []
    for spoken in (text, changed):
        events = events_of(spoken)
        assert "".join(event.text for event in events if isinstance(event, TextAlignment)) == spoken
        codes = [code for event in events if isinstance(event, CodecDelta) for code in event.codes]
        frames.append(np.reshape(codes, (-1, 16)))
    first_changed = int(np.flatnonzero((frames[0] != frames[1]).any(axis=1))[0])
    told, ends = "", []
    for event in events:
        if isinstance(event, TextAlignment):
            told += event.text
            ends += [event.end_sample] * (len(told) - len(ends))
    num_samples = sum(event.samples.size for event in events if isinstance(event, AudioDelta))
    assert ends[text.index("three")] * len(frames[1]) == (first_changed + 1) * num_samples


@pytest.mark.parametrize("served", ["tiny.custom_voice"], indirect=True)
def test_sessions_speak_while_they_are_written_and_leave_nothing(served: Served) -> None:
    """Two hundred, half of which are left at a moment of their own, and a tenth is never written to its
    end."""
    live = served.live

    async def session(app: FastAPI, number: int) -> None:
        async with SpeechClient(app=app) as client:
            limit = {"talker": {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}}
            await client.configured(voice="Vivian", stage_sampling=limit, alignment=number % 3 == 0)
            await client.send("input.text", text="I ")
            if number == 0:
                await client.until("binary")  # before the text ends
            if number % 2:
                await asyncio.sleep(number / 200)
            elif number % 10 == 2:
                assert (await client.until("error"))["error"]["code"] == "text_timeout"
                assert (await client.until("session.done"))["status"] == "failed"
            else:
                assert (await client.speak("speak", " number ", str(number)))[-1]["status"] == "completed"

    async def all_sessions() -> None:
        state = ServerState(live.omni)
        patient, hasty = create_app(state, ApiConfig()), create_app(state, ApiConfig(body_timeout_s=2.0))
        async with asyncio.TaskGroup() as group:
            for number in range(200):
                group.create_task(session(hasty if number % 10 == 2 else patient, number))
        await asyncio.wait_for(state.wait_idle(), 30)
        assert (state.num_sessions, state.unsent.num_bytes, live.omni.num_running) == (0, 0, 0)

    live.run(all_sessions())
    assert live.held_rows() == 0
    case = CASES["short_streamed"]
    served.check(case, live.answer(served.request(case)))


def test_half_a_minute_equals_the_reference_which_decodes_it_in_one_pass(two_seats: Served) -> None:
    case = CASES["half_a_minute"]
    two_seats.check(case, two_seats.live.answer(two_seats.request(case)))


@pytest.mark.parametrize("stage", ["talker", "code2wav"])
def test_after_a_restart_speech_equals_the_reference(two_seats: Served, stage: str) -> None:
    endless = replace(CASES["half_a_minute"], min_frames=1500, max_frames=1500)
    two_seats.live.kill_while_speaking(stage, two_seats.request(endless))
    cases = two_seats.cases[::5]
    answers = two_seats.live.answers([two_seats.request(case) for case in cases])
    for case, answer in zip(cases, answers, strict=True):
        two_seats.check(case, answer)
    assert two_seats.live.held_rows() == 0
