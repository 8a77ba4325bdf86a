"""Starts this server's engines with a stage config, and collects their answers."""

import asyncio
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
from omni_server.family import ModelFamily
from omni_server.family.codec import CodecLayout, DecoderWindow
from omni_server.offline import collect
from omni_server.omni import AsyncOmni
from omni_server.orchestrator.codec_edge import load_edge_function
from omni_server.types import OmniRequest, SamplingConfig, SpeechOutput
from omni_server.verify.cases import Case

NOISE_SEED = 7
"""For every waveform, here and in the reference."""

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


def answer_all(
    cases: Sequence[Case],
    folder: Path,
    config: StageConfig,
    family: ModelFamily,
    codec: CodecLayout | None,
    *,
    timeout_s: float,
    on_progress: Progress,
) -> list[Answer | str]:
    """Answers cases one after the other; a `str` says why there is no answer. Always stops the engines.
    `timeout_s` applies to each answer.

    Raises `ConfigError` if the engines do not start.
    """

    async def answered(omni: _WholeDecoder, case: Case) -> Answer | str:
        try:
            async with asyncio.timeout(timeout_s):
                return await _answer(omni, case, config, codec, timeout_s)
        except OmniError as error:
            return f"omni-server failed: {error}"
        except TimeoutError:
            return f"omni-server took more than {timeout_s:g} s"

    async def all_answered() -> list[Answer | str]:
        omni = await _WholeDecoder.start(folder, config, on_progress=on_progress)
        answers = []
        try:
            for number, case in enumerate(cases, 1):
                on_progress(f"omni-server, {number} of {len(cases)}: {case.name}")
                answers.append(await answered(omni, case))
        finally:
            await omni.stop()
        return answers

    on_progress("importing PyTorch and vLLM")
    fork_server.import_engine_modules(family)
    fork_server.fork_from_here(family)  # Ctrl-C would interrupt the imports of a new interpreter
    return asyncio.run(all_answered())


class _WholeDecoder(AsyncOmni):
    """Decodes all codes of an answer in one window, which no request does."""

    async def decode(self, stage: str, window: DecoderWindow) -> Samples:
        decoder = self._engines.diffusion[stage].any_engine
        return await decoder.run(f"verify-{uuid.uuid4().hex}", window.token_ids, window.payload)


async def _answer(
    omni: _WholeDecoder, case: Case, config: StageConfig, codec: CodecLayout | None, timeout_s: float
) -> Answer:
    output = await collect(omni, _request(case, config, timeout_s))
    return Answer(
        prompt_tokens=output.usage.prompt.total,
        text_ids=output.token_ids,
        codes=output.codes,
        streamed=output.audio,
        whole=await _decoded_whole(omni, case, output.codes, config, codec),
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
    speech = None
    if case.voice is not None:
        speech = SpeechOutput(case.voice, NOISE_SEED, prompt.text, clone=case.clone)
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
    width = config.frames.num_codebooks
    frames = [codes[start : start + width] for start in range(0, len(codes), width)]
    (window,) = [*cutting.push(frames), *cutting.finish()]
    return await omni.decode(edge.target, window)
