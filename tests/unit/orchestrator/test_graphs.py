"""Requests through the pipelines of the toy families, whose graphs are not that of Qwen2.5-Omni."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from omni_server.config.pipeline import StageSpec
from omni_server.config.stage_config import StageConfig
from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import Stage
from omni_server.errors import ConfigError, OverloadedError
from omni_server.family import FamilyModel
from omni_server.family.codec import CodecLayout
from omni_server.omni import warm_up_request
from omni_server.orchestrator import speech_stream
from omni_server.orchestrator.orchestrator import Orchestrator
from omni_server.types import (
    AudioDelta,
    ChatMessage,
    CodecDelta,
    Finished,
    OmniEvent,
    OmniRequest,
    SpeechOutput,
    TextAlignment,
    TextPart,
)
from tests.toy_families import speech_only
from tests.toy_families.decoding import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from tests.toy_families.speech_only import NUM_CODEBOOKS, SpeechModel
from tests.toy_families.toy import END
from tests.unit.engine.simulated_engine import until
from tests.unit.orchestrator.fake_stages import FakeCode2Wav, collected, only, settle, submit
from tests.unit.orchestrator.test_orchestrator import FakeEntry
from tests.unit.orchestrator.test_text_source import LettersAsTokens

OUTPUT_RATE_HZ = 24_000


class Vocoder(FakeCode2Wav):
    """A sine that goes on from window to window, at the decoder's rate."""

    def __init__(self, rate_hz: int) -> None:
        super().__init__("vocoder")
        self._rate_hz = rate_hz
        self._position = 0

    async def run(self, *arguments: Any, **options: Any) -> npt.NDArray[np.float32]:
        _, token_ids, *_ = arguments
        count = len(token_ids) // NUM_CODEBOOKS * SAMPLES_PER_FRAME
        self._position += count
        return sine(self._position - count, count, self._rate_hz)


def sine(first: int, count: int, rate_hz: int) -> npt.NDArray[np.float32]:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(first, first + count) / rate_hz)).astype(np.float32)


class ReadingFamily(speech_only.SpeechFamily):
    pipeline = replace(
        speech_only.FAMILY.pipeline,
        stages={**speech_only.FAMILY.pipeline.stages, "speaker": StageSpec("ar", reads_text=True)},
    )


READING = ReadingFamily()


class SpeechOnly:
    """The speech-only family without its engines; `layout` in place of its codec's."""

    def __init__(
        self,
        layout: CodecLayout | None = SpeechModel.codec,
        *,
        voices: tuple[str, ...] = ("Low",),
        family: str = "tests.toy_families.speech_only:FAMILY",
    ) -> None:
        self.model = SpeechModel(Path())
        self.model.codec, self.model.voices = layout, voices
        self.speaker = FakeEntry("speaker", prompt=(1, 2, 3))
        self.vocoder = Vocoder(SAMPLE_RATE_HZ if layout is None else layout.sample_rate_hz)
        document = {
            "model_family": family,
            "platform": "cpu",
            "stages": {
                "speaker": {"max_model_len": 512},
                "vocoder": {"max_model_len": 64},
            },
        }
        self.config = StageConfig.model_validate(document)

    def orchestrator(self) -> Orchestrator:
        return Orchestrator(
            cast(FamilyModel, self.model),
            self.config,
            ar={"speaker": Stage("speaker", (cast(ArHandle, self.speaker),))},
            diffusion={"vocoder": Stage("vocoder", (cast(DiffusionHandle, self.vocoder),))},
            request_timeout_s=30.0,
        )


def request(**options: Any) -> OmniRequest:
    return OmniRequest("a", (ChatMessage("user", (TextPart("Hello"),)),), SpeechOutput(), **options)


@pytest.mark.parametrize("rate_hz", [16_000, 44_100, OUTPUT_RATE_HZ])
async def test_audio_of_any_rate_is_as_long_as_its_frames_and_without_a_click(
    rate_hz: int,
) -> None:
    """The end-of-speech token comes within a frame, whose tokens are not spoken."""
    num_frames = 25
    assert SpeechModel.codec is not None
    server = SpeechOnly(replace(SpeechModel.codec, sample_rate_hz=rate_hz))
    events = asyncio.create_task(collected(await submit(server.orchestrator(), request())))
    await settle()
    tokens = [*range(NUM_CODEBOOKS * num_frames), 7, 7, END]
    while len(tokens) > 3:
        portion, tokens = tokens[:7], tokens[7:]
        server.speaker.stream.send(*portion)
    server.speaker.stream.send(*tokens, finish="stop")
    got = await asyncio.wait_for(events, 5)

    audio = [event for event in got if isinstance(event, AudioDelta)]
    ends = np.cumsum([0, *(delta.samples.size for delta in audio)])
    samples = np.concatenate([delta.samples for delta in audio])
    wanted = sine(0, round(num_frames * SAMPLES_PER_FRAME * OUTPUT_RATE_HZ / rate_hz), OUTPUT_RATE_HZ)
    assert len(audio) > 2
    assert [delta.first_sample for delta in audio] == ends[:-1].tolist()
    assert samples.shape == wanted.shape
    assert np.abs(samples - wanted)[200:-200].max() < 1e-3
    spoken = [token for event in got if isinstance(event, CodecDelta) for token in event.codes]
    assert spoken == list(range(NUM_CODEBOOKS * num_frames))
    end = only(Finished, got)
    assert isinstance(end, Finished)
    assert (end.finish_reason, end.usage.codec_tokens) == ("stop", num_frames)


async def test_warm_up_reaches_the_decoder_however_many_codebooks_a_frame_has() -> None:
    server = SpeechOnly()
    wanted = warm_up_request(server.config, is_greedy=True)
    events = asyncio.create_task(collected(await submit(server.orchestrator(), wanted)))
    await settle()
    (params,) = server.speaker.params
    assert params.max_tokens == params.min_tokens == 4 * NUM_CODEBOOKS
    assert params.max_tokens is not None
    server.speaker.stream.send(*[7] * params.max_tokens, finish="length")
    assert any(isinstance(event, AudioDelta) for event in await asyncio.wait_for(events, 5))


def test_warm_up_asks_a_model_for_all_that_it_answers_with() -> None:
    length = {"max_model_len": 64}
    stages = {
        "brain": length | {"model_stage": "writer"},
        "speaker": length,
        "vocoder": length,
    }
    document = {"model_family": "tests.toy_families.branched:FAMILY", "platform": "cpu", "stages": stages}
    wanted = warm_up_request(StageConfig.model_validate(document), is_greedy=False)
    assert (wanted.speech, wanted.image) == (SpeechOutput(), None)
    assert {name: sampling.max_tokens for name, sampling in wanted.sampling.items()} == {
        "brain": 4,
        "speaker": 16,
    }


@pytest.mark.parametrize(
    ("layout", "voices", "missing"),
    [(None, ("Low",), "describes no codec"), (SpeechModel.codec, (), "has no voices")],
)
def test_a_model_that_lacks_what_speech_needs_is_refused_at_the_start(
    layout: CodecLayout | None, voices: tuple[str, ...], missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"{missing}; the edge speaker -> vocoder needs it"):
        SpeechOnly(layout, voices=voices).orchestrator()


@pytest.mark.parametrize("end", ["deadline", "cancelled", "shutdown", "aborted"])
async def test_a_text_that_is_still_written_is_closed_however_its_request_ends(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, may_come, closed = SpeechOnly(family=f"{__name__}:READING"), asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(server.model, "speech_text", lambda *_: LettersAsTokens())
    orchestrator = server.orchestrator()

    async def endless() -> AsyncGenerator[str, None]:
        try:
            while await may_come.wait():
                await asyncio.sleep(0)
                yield "a"
        finally:
            closed.set()

    deadline_s = 0.01 if end == "deadline" else 5.0
    wanted = OmniRequest("a", (), SpeechOutput(pieces=endless()), deadline_s=deadline_s)
    submitted = asyncio.create_task(submit(orchestrator, wanted))
    await settle()
    if end == "cancelled":
        submitted.cancel()
    elif end == "shutdown":
        await orchestrator.close()
    if end != "deadline":
        may_come.set()
    await asyncio.wait([submitted])
    if end == "aborted":
        await submitted.result().aclose()
    elif end == "shutdown":
        assert isinstance(submitted.exception(), OverloadedError)
    del wanted, submitted
    gc.collect()  # a caller who keeps the request keeps its text
    await asyncio.wait_for(closed.wait(), 5)
    assert orchestrator.num_running == 0


async def test_a_text_that_pauses_is_heard_so_far_and_each_frame_tells_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speech_stream, "PAUSE_S", 0.01)
    server, goes_on = SpeechOnly(family=f"{__name__}:READING"), asyncio.Event()
    monkeypatch.setattr(server.model, "speech_text", lambda *_: LettersAsTokens())

    async def pieces() -> AsyncGenerator[str, None]:
        yield "abcd"
        await goes_on.wait()
        yield "e"

    wanted = OmniRequest("a", (), SpeechOutput(pieces=pieces(), is_aligned=True))
    run, events = await submit(server.orchestrator(), wanted), list[OmniEvent]()

    async def listen() -> None:
        async for event in run:
            events.append(event)

    listening = asyncio.create_task(listen())
    await settle()
    server.speaker.stream.send(*range(4 * NUM_CODEBOOKS))  # one window, and half of the next one

    def num_heard() -> int:
        return sum(event.samples.size for event in events if isinstance(event, AudioDelta))

    samples_per_frame = SAMPLES_PER_FRAME * OUTPUT_RATE_HZ // SAMPLE_RATE_HZ
    await until(lambda: num_heard() > 3 * samples_per_frame)
    assert num_heard() <= 4 * samples_per_frame
    goes_on.set()
    await settle()
    server.speaker.stream.send(*range(2 * NUM_CODEBOOKS), END, finish="stop")
    await asyncio.wait_for(listening, 5)
    told = [(event.text, event.end_sample) for event in events if isinstance(event, TextAlignment)]
    assert told == [(char, number * samples_per_frame) for number, char in enumerate("abcde", 1)]
    assert num_heard() == 6 * samples_per_frame
