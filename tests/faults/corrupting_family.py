"""Families that spoil the data of one request while a file says so. Only the tests name them.

The victim is known by its length, and by its voice where there are codec tokens only. What is spoiled in the
server's own process is here, the models that do it in the engines are in `corrupting_models`.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreOutput

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.pipeline import Pipeline
from omni_server.engine.async_engine import StageOutputProcessor
from omni_server.family import HfOverrides
from omni_server.family.codec import CodecLayout, DecoderWindow, Frame
from omni_server.family.speech_text import SpeechPrompt
from omni_server.orchestrator.row_feeder import TextRowFeeder
from omni_server.protocol.rows import RowsFeed, RowsPayload, TextSegment
from stages import qwen3_omni as omni
from stages import qwen3_tts as tts
from stages.qwen3_omni.family import Qwen3OmniFamily, Qwen3OmniModel
from stages.qwen3_tts.family import Qwen3TTSFamily, Qwen3TTSModel
from stages.qwen3_tts.layout import PromptRows
from stages.qwen3_tts.speech_text import Qwen3TTSText
from stages.qwen_codec.talker_to_code2wav import TalkerToCode2Wav
from tests.faults.orders import FOLDER_VARIABLE
from tests.faults.replaced_models import override_with, register_models

MODELS = "tests.faults.corrupting_models"
OMNI = {"thinker": "CorruptingThinker", "talker": "CorruptingTalker", "code2wav": "CorruptingCode2Wav"}
TTS = {"talker": "CorruptingTTSTalker", "code2wav": "CorruptingTTSCode2Wav"}
VICTIM_LENGTH = 300
"""The victim's prompt is longer; prompt and reply of all others are shorter, in both language models."""
VICTIM_VOICES = ("Ethan", "Ryan")
VICTIM_STREAM = "victim"
"""How the names of its streams begin in code2wav, which is told no voice."""


def order_to_spoil(folder: Path, place: str, what: str) -> None:
    """From now on, until it is withdrawn."""
    (folder / f"new-{place}").write_text(what)
    (folder / f"new-{place}").rename(folder / f"spoil-{place}")


def ordered(place: str) -> str | None:
    """What is to be spoiled there."""
    try:
        return (Path(os.environ[FOLDER_VARIABLE]) / f"spoil-{place}").read_text()
    except FileNotFoundError:
        return None


def with_spoiled_windows(pipeline: Pipeline) -> Pipeline:
    *others, last = pipeline.edges
    return replace(pipeline, edges=(*others, replace(last, function=f"{__name__}:SpoiledWindows")))


class CorruptingQwen3(Qwen3OmniFamily):
    pipeline = with_spoiled_windows(omni.FAMILY.pipeline)
    engine_modules = (*Qwen3OmniFamily.engine_modules, MODELS)

    def open(self, model_dir: Path) -> Qwen3OmniModel:
        """In the server's process only."""
        TextRowFeeder.take = spoiled_media  # type: ignore[method-assign, assignment]
        TextRowFeeder._next_text = spoiled_text  # type: ignore[method-assign, assignment]
        StageOutputProcessor.process_outputs = spoiled_outputs  # type: ignore[method-assign, assignment]
        return super().open(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return override_with(omni.FAMILY, model_stage, OMNI)

    def register(self) -> None:
        super().register()
        register_corrupting_models()


class CorruptingTTS(Qwen3TTSFamily):
    pipeline = with_spoiled_windows(tts.FAMILY.pipeline)
    engine_modules = (*Qwen3TTSFamily.engine_modules, MODELS)

    def open(self, model_dir: Path) -> Qwen3TTSModel:
        """In the server's process only."""
        Qwen3TTSText.prompt = spoiled_prompt  # type: ignore[method-assign, assignment]
        StageOutputProcessor.process_outputs = spoiled_outputs  # type: ignore[method-assign, assignment]
        return super().open(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return override_with(tts.FAMILY, model_stage, TTS)

    def register(self) -> None:
        super().register()
        register_corrupting_models()


def register_corrupting_models() -> None:
    register_models(MODELS, OMNI)
    register_models(MODELS, TTS)


# -- the layout of a prompt on its way to the talker that reads it


_prompt = Qwen3TTSText.prompt


def spoiled_prompt(text: Qwen3TTSText) -> SpeechPrompt | None:
    """The victim's."""
    prompt, what = _prompt(text), ordered("prompt")
    if prompt is None or what is None or len(prompt.token_ids) < VICTIM_LENGTH:
        return prompt
    rows = msgspec.msgpack.decode(prompt.rows, type=PromptRows)
    match what:
        case "cut":
            return replace(prompt, rows=prompt.rows[:-1])
        case "a row lost":
            rows = PromptRows(rows.text[:-1], rows.codec[:-1])
        case "unknown id":
            rows = PromptRows((10**6, *rows.text[1:]), rows.codec)
        case _:
            raise AssertionError(what)
    return replace(prompt, rows=msgspec.msgpack.encode(rows))


# -- rows on their way from the thinker to the talker


_take_media = TextRowFeeder.take
_next_text = TextRowFeeder._next_text


def spoiled_media(feeder: TextRowFeeder, payload: RowsPayload) -> None:
    """The victim's rows of its image."""
    what = ordered("rows")
    if what is None or payload.prompt_length < VICTIM_LENGTH:
        _take_media(feeder, payload)
    elif what == "lost":
        feeder._drop(RowsFeed(payload))
    else:
        raise AssertionError(what)


def spoiled_text(feeder: TextRowFeeder, end: int) -> tuple[TextSegment, ...]:
    """The victim's ids of text."""
    what = ordered("text ids")
    segments = _next_text(feeder, end)
    if what is None or feeder._num_first_rows < VICTIM_LENGTH or not segments:
        return segments
    (segment,) = segments
    match what:
        case "lost":
            return (replace_ids(segment, segment.token_ids[:-1]),) if segment.num_rows > 1 else ()
        case "unknown":
            return (replace_ids(segment, (10**6, *segment.token_ids[1:])),)
        case _:
            raise AssertionError(what)


def replace_ids(segment: TextSegment, token_ids: tuple[int, ...]) -> TextSegment:
    return TextSegment(segment.first_position, token_ids)


# -- codes that the talker has predicted, on their way to the server


_process_outputs = StageOutputProcessor.process_outputs


def spoiled_outputs(
    processor: StageOutputProcessor, outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any
) -> Any:
    """The victim's codes of one token."""
    what = ordered("predicted codes")
    for output in outputs if processor._num_predicted and what == "lost" else ():
        state = processor.request_states.get(output.request_id)
        if state is not None and state.prompt_len > VICTIM_LENGTH and output.pooling_output is not None:
            output.pooling_output = output.pooling_output[1:]
    return _process_outputs(processor, outputs, *args, **kwargs)


# -- windows on their way from the talker to code2wav


class SpoiledWindows(TalkerToCode2Wav):
    """The victim's second window."""

    def __init__(
        self, plan: ChunkPlan, layout: CodecLayout, *, voice: str, noise_seed: int, past: Sequence[Frame] = ()
    ) -> None:
        super().__init__(plan, layout, voice=voice, noise_seed=noise_seed, past=past)
        self._is_victim = voice in VICTIM_VOICES
        self._sent: list[DecoderWindow] = []
        if self._is_victim:
            self._stream = f"{VICTIM_STREAM} {self._stream}"

    def push(self, frames: Sequence[Frame]) -> list[DecoderWindow]:
        return self._spoiled(super().push(frames))

    def finish(self) -> list[DecoderWindow]:
        return self._spoiled(super().finish())

    def _spoiled(self, windows: Sequence[DecoderWindow]) -> list[DecoderWindow]:
        what = ordered("windows") if self._is_victim else None
        return [self._spoiled_one(window, what) for window in windows]

    def _spoiled_one(self, window: DecoderWindow, what: str | None) -> DecoderWindow:
        self._sent.append(window)
        if len(self._sent) != 2 or what is None:
            return window
        match what:
            case "the first again":  # in the place of the second, so that only code2wav can notice
                first = self._sent[0]
                return replace(first, first_sample=window.first_sample, num_samples=window.num_samples)
            case "unknown code":  # a predicted one
                return replace(window, token_ids=(*window.token_ids[:5], 9000, *window.token_ids[6:]))
            case _:
                raise AssertionError(what)


qwen3_omni = CorruptingQwen3()
qwen3_tts = CorruptingTTS()
