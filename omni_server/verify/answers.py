"""Starts this server's engines with a stage config, and collects answers and a caller's timings."""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import ArStage
from omni_server.engine import fork_server
from omni_server.errors import OmniError
from omni_server.family import CodecLayout, DecoderWindow, ModelFamily
from omni_server.omni import AsyncOmni
from omni_server.orchestrator.codec_edge import load_edge_function
from omni_server.types import (
    SAMPLE_RATE_HZ,
    AudioDelta,
    CodecDelta,
    Finished,
    OmniRequest,
    SamplingConfig,
    SpeechOutput,
    TextDelta,
)
from omni_server.verify.cases import Case

NOISE_SEED = 7
"""For every waveform, here and in the reference."""
STOP_TIMEOUT_S = 120.0

Samples = npt.NDArray[np.float32]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """The answer to one request. T: codec tokens."""

    prompt_tokens: int
    text_ids: tuple[int, ...]
    """Includes the end token if the model generated it."""
    codes: tuple[int, ...]
    """[T], frame by frame, the stop code excluded."""
    streamed: Samples  # [num_samples], 24 kHz
    whole: Samples | None
    """[num_samples], the same codes decoded in one window; None if there are none or too many for a
    window."""
    first_audio_s: float | None
    """Seconds from the request to the first audio."""
    total_s: float
    """Seconds from the request to the end of the answer."""

    @property
    def real_time_factor(self) -> float | None:
        """Seconds per second of speech; None without speech."""
        return self.total_s * SAMPLE_RATE_HZ / len(self.streamed) if len(self.streamed) else None


@dataclass(frozen=True)
class NoAnswer:
    reason: str


def answer_all(
    cases: Sequence[Case],
    folder: Path,
    config: StageConfig,
    family: ModelFamily,
    codec: CodecLayout | None,
    *,
    timeout_s: float,
    on_progress: Progress,
) -> list[Answer | NoAnswer]:
    """Answers cases one after the other, so that times are those of a single caller. Always stops the
    engines. `timeout_s` applies to each answer.

    Raises `ConfigError` if the engines do not start, and `OmniError` if they do not end.
    """

    async def answered(omni: _WholeDecoder, case: Case) -> Answer | NoAnswer:
        try:
            async with asyncio.timeout(timeout_s):
                return await _answer(omni, case, config, codec, timeout_s)
        except OmniError as error:
            return NoAnswer(f"omni-server failed: {error}")
        except TimeoutError:
            return NoAnswer(f"omni-server took more than {timeout_s:g} s")

    async def all_answered() -> list[Answer | NoAnswer]:
        omni = await _WholeDecoder.start(folder, config, on_progress=on_progress)
        answers = []
        try:
            for number, case in enumerate(cases, 1):
                on_progress(f"omni-server, {number} of {len(cases)}: {case.name}")
                answers.append(await answered(omni, case))
        finally:
            await _stop(omni)
        return answers

    on_progress("importing PyTorch and vLLM")
    fork_server.import_engine_modules(family)
    fork_server.fork_from_here(family)  # Ctrl-C would interrupt the imports of a new interpreter
    return asyncio.run(all_answered())


async def _stop(omni: AsyncOmni) -> None:
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await omni.stop()
    except TimeoutError as error:
        raise OmniError(f"the engines have not ended within {STOP_TIMEOUT_S:g} s") from error


class _WholeDecoder(AsyncOmni):
    """Decodes all codes of an answer in one window, which no request does."""

    async def decode(self, stage: str, window: DecoderWindow) -> Samples:
        decoder = self._engines.diffusion[stage].any_engine
        return await decoder.run(f"verify-{uuid.uuid4().hex}", window.token_ids, window.payload)


async def _answer(
    omni: _WholeDecoder, case: Case, config: StageConfig, codec: CodecLayout | None, timeout_s: float
) -> Answer:
    text_ids: list[int] = []
    codes: list[int] = []
    sound: list[Samples] = []
    first_audio_s: float | None = None
    prompt_tokens = 0
    began = time.monotonic()
    async for event in await omni.submit(_request(case, config, timeout_s)):
        match event:
            case TextDelta():
                text_ids.extend(event.token_ids)
            case CodecDelta():
                codes.extend(event.codes)
            case AudioDelta():
                if first_audio_s is None:
                    first_audio_s = time.monotonic() - began
                sound.append(event.samples)
            case Finished():
                prompt_tokens = event.usage.prompt.total
    total_s = time.monotonic() - began
    return Answer(
        prompt_tokens=prompt_tokens,
        text_ids=tuple(text_ids),
        codes=tuple(codes),
        streamed=np.concatenate(sound) if sound else np.zeros(0, np.float32),
        whole=await _decoded_whole(omni, case, tuple(codes), config, codec),
        first_audio_s=first_audio_s,
        total_s=total_s,
    )


def _request(case: Case, config: StageConfig, timeout_s: float) -> OmniRequest:
    """Greedy in all stages, with the stage config's repetition penalties."""
    prompt, speech_edge = case.prompt, config.speech_edge
    speech_stage = None if speech_edge is None else speech_edge.source
    sampling = {
        name: SamplingConfig(
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=_penalty(stage),
            presence_penalty=0.0,
            frequency_penalty=0.0,
            min_tokens=0,
            ignore_eos=False,
            max_tokens=prompt.max_codes if name == speech_stage else prompt.max_text_tokens,
        )
        for name, stage in config.stages.items()
        if isinstance(stage, ArStage)
    }
    speech = None if case.voice is None else SpeechOutput(case.voice, NOISE_SEED, prompt.text)
    return OmniRequest(
        f"verify-{uuid.uuid4().hex}", prompt.messages, speech, sampling, deadline_s=timeout_s, is_logged=False
    )


def repetition_penalties(config: StageConfig) -> dict[str, float]:
    """By the family's names of autoregressive stages."""
    stages = config.stages.values()
    return {stage.model_stage: _penalty(stage) for stage in stages if isinstance(stage, ArStage)}


def _penalty(stage: ArStage) -> float:
    return stage.default_sampling.repetition_penalty or 1.0


async def _decoded_whole(
    omni: _WholeDecoder, case: Case, codes: tuple[int, ...], config: StageConfig, codec: CodecLayout | None
) -> Samples | None:
    edge = config.speech_edge
    if codec is None or edge is None or edge.chunks is None or case.voice is None:
        return None
    is_audio = config.stage_spec(edge.target).output == "audio"
    if not is_audio or not 0 < len(codes) <= config.stages[edge.target].max_model_len:
        return None
    factory = load_edge_function(config.spec_of(edge).function)
    plan = edge.chunks.model_copy(update={"mode": "whole"})
    cutting = factory(plan, codec, voice=case.voice, noise_seed=NOISE_SEED)
    width = config.num_codebooks
    frames = [codes[start : start + width] for start in range(0, len(codes), width)]
    (window,) = [*cutting.push(frames), *cutting.finish()]
    return await omni.decode(edge.target, window)
