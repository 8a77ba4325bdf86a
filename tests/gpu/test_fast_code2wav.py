"""The fused kernels and CUDA graphs of code2wav against plain float32, at the 7B's sizes; run by hand with -s.

The bounds are this project's promise for the fast path (docs/performance.md): random weights, so they say how exact the
arithmetic is, not how trained weights react to it.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

import stages.qwen2_5_omni.demo_checkpoint
from omni_server.config.stage_config import ChunkPlan
from omni_server.protocol.diffusion_config import ComputeDtype, DiffusionRuntimeConfig, FlowSolver
from stages.codec_chunking import CodecChunker
from stages.qwen2_5_omni.code2wav.noise import noise_frames
from stages.qwen2_5_omni.code2wav.pipeline import Code2WavPipeline, WindowJob
from stages.qwen2_5_omni.code2wav.voices import Voice
from tests.reference.token2wav import MEL_LEVEL, random_token2wav

pytestmark = pytest.mark.gpu

SEED = 3
FAST_BOUND_DB: dict[ComputeDtype, float] = {"float32": 90.0, "float16": 40.0, "bfloat16": 25.0}
"""Lowest signal-to-noise ratio of a window's waveform against plain float32. Measured on one H200: 98, 49 and 31."""

RUNTIME = DiffusionRuntimeConfig(
    solver=FlowSolver(num_steps=10, guidance_scale=0.5, sway_coefficient=-1.0),
    compute_dtype="float32",
    is_fast=False,
    max_num_windows=8,
    max_num_codes=1056,
    longest_window=400,
)


def snr_db(result: torch.Tensor, reference: torch.Tensor) -> float:
    assert result.shape == reference.shape
    error = result.double().cpu() - reference.double().cpu()
    return float(10 * torch.log10(reference.double().square().sum().cpu() / error.square().sum()))


@pytest.fixture(scope="module")
def token2wav() -> Qwen2_5OmniToken2WavModel:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    folder = Path(stages.qwen2_5_omni.demo_checkpoint.__file__).parent
    config = json.loads((folder / "qwen2_5_omni_7b.config.json").read_text())["token2wav_config"]
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


def windows(num_codes: int, plan: ChunkPlan, voice: int) -> list[WindowJob]:
    draw = torch.Generator().manual_seed(num_codes)
    chunker = CodecChunker(plan, codes_per_block=12)
    chunker.push(torch.randint(0, 8193, (num_codes,), generator=draw).tolist())
    chunker.finish()
    jobs = []
    for piece in chunker.ready():
        noise = torch.from_numpy(noise_frames(SEED, 2 * piece.first_code, 2 * len(piece.codes), 80))
        span = piece.span(voice=("Ethan", "Chelsie")[voice], noise_seed=SEED)
        jobs.append(WindowJob(span, torch.tensor(piece.codes), noise, voice))
    return jobs


def joined(waveforms: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([waveform.cpu() for waveform in waveforms])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_fast_path_is_within_its_bound_of_plain_float32(
    token2wav: Qwen2_5OmniToken2WavModel, voices: list[Voice], dtype: ComputeDtype
) -> None:
    models = token2wav.code2wav_dit_model, token2wav.code2wav_bigvgan_model
    plain = Code2WavPipeline(*models, voices, RUNTIME)
    fast = Code2WavPipeline(*models, voices, msgspec.structs.replace(RUNTIME, compute_dtype=dtype, is_fast=True))
    fast.warm_up()
    plan = ChunkPlan()
    lengths = (1, 11, 24, 37, 250)
    jobs = [window for index, length in enumerate(lengths) for window in windows(length, plan, index % 2)]
    references = plain.run(jobs)
    together = [snr_db(result, reference) for result, reference in zip(fast.run(jobs), references, strict=True)]
    alone = [snr_db(fast.run([job])[0], reference) for job, reference in zip(jobs, references, strict=True)]
    print(f"\n{dtype}: lowest SNR {min(together):.1f} dB together, {min(alone):.1f} dB alone")  # noqa: T201
    assert min(together + alone) > FAST_BOUND_DB[dtype]


def test_chunks_of_the_fast_path_against_the_whole_utterance_in_plain_float32(
    token2wav: Qwen2_5OmniToken2WavModel, voices: list[Voice]
) -> None:
    models = token2wav.code2wav_dit_model, token2wav.code2wav_bigvgan_model
    plain = Code2WavPipeline(*models, voices, RUNTIME)
    fast = Code2WavPipeline(*models, voices, msgspec.structs.replace(RUNTIME, compute_dtype="float16", is_fast=True))
    whole = joined(plain.run(windows(250, ChunkPlan(mode="whole"), 0)))
    chunked_plain = joined(plain.run(windows(250, ChunkPlan(), 0)))
    chunked_fast = joined(fast.run(windows(250, ChunkPlan(), 0)))
    print(  # noqa: T201
        f"\nagainst one plain pass over 250 codes: plain windows {snr_db(chunked_plain, whole):.1f} dB, "
        f"fast windows {snr_db(chunked_fast, whole):.1f} dB; fast against plain windows "
        f"{snr_db(chunked_fast, chunked_plain):.1f} dB"
    )
    assert snr_db(chunked_fast, chunked_plain) > FAST_BOUND_DB["float16"]
    assert snr_db(chunked_fast, whole) > 25.0
