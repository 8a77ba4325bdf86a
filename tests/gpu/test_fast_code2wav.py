"""The fused kernels and CUDA graphs of code2wav against plain float32, at the 7B's sizes; run by hand with
-s.

The bounds are this project's promise for the fast path (docs/performance.md): random weights, so they say how
exact the arithmetic is, not how trained weights react to it.
"""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import msgspec
import pytest
import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniToken2WavConfig,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

import tests.checkpoints
from omni_server.protocol.diffusion_config import ComputeDtype, DiffusionRuntimeConfig
from stages.codec_chunking import CodecChunker
from stages.qwen2_5_omni.code2wav.noise import noise_frames
from stages.qwen2_5_omni.code2wav.pipeline import Code2WavPipeline, WindowJob
from stages.qwen2_5_omni.code2wav.voices import Voice
from stages.qwen2_5_omni.options import Code2WavChunks
from stages.qwen2_5_omni.talker_to_code2wav import codec_window
from tests.reference.token2wav import MEL_LEVEL, code2wav_stage, random_token2wav

pytestmark = pytest.mark.gpu

SEED = 3
FAST_BOUND_DB: dict[ComputeDtype, float] = {"float32": 90.0, "float16": 40.0, "bfloat16": 25.0}
"""Lowest signal-to-noise ratio of a window's waveform against plain float32. Measured on one H200: 98, 49 and
31."""

RUNTIME = DiffusionRuntimeConfig(
    stage=code2wav_stage(max_num_seqs=8, max_num_batched_tokens=1056, max_model_len=400),
    compute_dtype="float32",
    is_fast=False,
)


def snr_db(result: torch.Tensor, reference: torch.Tensor) -> float:
    assert result.shape == reference.shape
    error = result.double().cpu() - reference.double().cpu()
    return float(10 * torch.log10(reference.double().square().sum().cpu() / error.square().sum()))


@pytest.fixture(scope="module")
def token2wav() -> Qwen2_5OmniToken2WavModel:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    folder = Path(tests.checkpoints.__file__).parent
    config = json.loads((folder / "qwen2_5_omni" / "7b.config.json").read_text())["token2wav_config"]
    return random_token2wav(Qwen2_5OmniToken2WavConfig(**config), "cuda")


@pytest.fixture(scope="module")
def voices() -> list[Voice]:
    draw = torch.Generator().manual_seed(1)
    return [
        Voice(
            name,
            0,
            torch.randn(1, 192, generator=draw),
            MEL_LEVEL + 1.5 * torch.randn(1, 400, 80, generator=draw),
        )
        for name in ("Ethan", "Chelsie")
    ]


def pipeline_of(
    token2wav: Qwen2_5OmniToken2WavModel, voices: list[Voice], runtime: DiffusionRuntimeConfig
) -> Code2WavPipeline:
    models = token2wav.code2wav_dit_model, token2wav.code2wav_bigvgan_model
    return Code2WavPipeline(*map(deepcopy, models), voices, runtime)


def windows(num_codes: int, plan: Code2WavChunks, voice: int, stream: str | None = None) -> list[WindowJob]:
    draw = torch.Generator().manual_seed(num_codes)
    chunker = CodecChunker(plan, 12)
    jobs = []
    for piece in [
        *chunker.push(torch.randint(0, 8193, (num_codes,), generator=draw).tolist()),
        *chunker.finish(),
    ]:
        noise = torch.from_numpy(noise_frames(SEED, 2 * piece.first_frame, 2 * len(piece.frames), 80))
        span = codec_window(piece, plan, voice=("Ethan", "Chelsie")[voice], noise_seed=SEED, stream=stream)
        jobs.append(WindowJob(span, torch.tensor(piece.frames), noise, voice))
    return jobs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_fast_path_is_within_its_bound_of_plain_float32(
    token2wav: Qwen2_5OmniToken2WavModel, voices: list[Voice], dtype: ComputeDtype
) -> None:
    plain = pipeline_of(token2wav, voices, RUNTIME)
    fast = pipeline_of(token2wav, voices, msgspec.structs.replace(RUNTIME, compute_dtype=dtype, is_fast=True))
    plan = Code2WavChunks()
    lengths = (1, 11, 24, 37, 250)
    jobs = [window for index, length in enumerate(lengths) for window in windows(length, plan, index % 2)]
    references = plain.run(jobs)
    together = [
        snr_db(result, reference) for result, reference in zip(fast.run(jobs), references, strict=True)
    ]
    alone = [snr_db(fast.run([job])[0], reference) for job, reference in zip(jobs, references, strict=True)]
    print(f"\n{dtype}: lowest SNR {min(together):.1f} dB together, {min(alone):.1f} dB alone")  # noqa: T201
    assert min(together + alone) > FAST_BOUND_DB[dtype]


def in_turns(pipeline: Code2WavPipeline, streams: Sequence[Sequence[WindowJob]]) -> list[list[torch.Tensor]]:
    """Windows of many streams, of which one more joins in each step; per stream its waveforms."""
    results: list[list[torch.Tensor]] = [[] for _ in streams]
    for turn in range(sum(map(len, streams))):
        batch = [n for n, jobs in enumerate(streams) if 0 <= turn - n < len(jobs)]
        if batch:
            for n, waveform in zip(batch, pipeline.run([streams[n][turn - n] for n in batch]), strict=True):
                results[n].append(waveform)
    return results


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_streams_on_the_fast_path_are_within_its_bound_of_plain_float32(
    token2wav: Qwen2_5OmniToken2WavModel, voices: list[Voice], dtype: ComputeDtype
) -> None:
    """Nine streams and one utterance of windows by themselves; eight slots, which are used again and
    again."""
    runtime = msgspec.structs.replace(RUNTIME, num_streams=8)
    plain = pipeline_of(token2wav, voices, runtime)
    fast = pipeline_of(token2wav, voices, msgspec.structs.replace(runtime, compute_dtype=dtype, is_fast=True))
    lengths = (250, 37, 130, 24, 11, 96, 250, 73, 60, 131)
    streams = [
        windows(length, Code2WavChunks(new_blocks=(1, 2, 6)), n % 2, None if n == 5 else f"s{n}")
        for n, length in enumerate(lengths)
    ]
    alone = [[plain.run([job])[0] for job in jobs] for jobs in streams]
    together = in_turns(fast, streams)
    assert (len(fast.streams.states), len(fast.streams.free_slots)) == (0, 8)
    again = [[fast.run([job])[0] for job in jobs] for jobs in streams]
    levels = [
        snr_db(result, reference)
        for results in (together, again)
        for waveforms, references in zip(results, alone, strict=True)
        for result, reference in zip(waveforms, references, strict=True)
    ]
    print(f"\n{dtype}: lowest SNR of {len(levels)} carried windows {min(levels):.1f} dB")  # noqa: T201
    assert min(levels) > FAST_BOUND_DB[dtype]
