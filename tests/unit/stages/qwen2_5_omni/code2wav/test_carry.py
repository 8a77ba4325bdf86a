"""Streams of windows that carry state, against one pass over the whole utterance and against windows by
themselves."""

from collections.abc import Callable, Sequence
from copy import deepcopy

import msgspec
import pytest
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from stages.codec_chunking import CodecChunker
from stages.qwen2_5_omni.code2wav.noise import noise_frames
from stages.qwen2_5_omni.code2wav.pipeline import Code2WavPipeline, WindowJob
from stages.qwen2_5_omni.code2wav.voices import Voice
from stages.qwen2_5_omni.options import Code2WavChunks, SolverConfig
from stages.qwen2_5_omni.talker_to_code2wav import codec_window
from tests.reference.token2wav import code2wav_stage

Codes = Callable[[int, int], torch.Tensor]
LIMITS: dict[str, object] = {"max_num_seqs": 16, "max_num_batched_tokens": 4096}
RUNTIME = DiffusionRuntimeConfig(
    stage=code2wav_stage(**LIMITS),
    compute_dtype="float32",
    is_fast=False,
)
QUICK = SolverConfig(num_steps=4)


def snr_db(result: torch.Tensor, reference: torch.Tensor) -> float:
    assert result.shape == reference.shape
    return float(10 * torch.log10(reference.square().sum() / (result - reference).square().sum()))


MakePipeline = Callable[..., Code2WavPipeline]


@pytest.fixture(scope="module")
def make_pipeline(token2wav: Qwen2_5OmniToken2WavModel, voices: tuple[Voice, Voice]) -> MakePipeline:
    """(num_streams, solver, further fields of the runtime config)"""

    def make(num_streams: int, solver: SolverConfig = QUICK, **fields: object) -> Code2WavPipeline:
        runtime = msgspec.structs.replace(
            RUNTIME, num_streams=num_streams, stage=code2wav_stage(**{"solver": solver} | LIMITS | fields)
        )
        return Code2WavPipeline(
            deepcopy(token2wav.code2wav_dit_model), token2wav.code2wav_bigvgan_model, voices, runtime
        )

    return make


def windows(
    codes: torch.Tensor, plan: Code2WavChunks, stream: str | None, *, voice: int = 0, seed: int = 9
) -> list[WindowJob]:
    chunker = CodecChunker(plan, 12)
    jobs = []
    for piece in [*chunker.push(codes.tolist()), *chunker.finish()]:
        span = codec_window(piece, plan, voice=("Ethan", "Chelsie")[voice], noise_seed=seed, stream=stream)
        span.validate(len(piece.frames), codes_per_block=12, frames_per_code=2)
        noise = torch.from_numpy(noise_frames(seed, 2 * piece.first_frame, 2 * len(piece.frames), 80))
        jobs.append(WindowJob(span, torch.tensor(piece.frames), noise, voice))
    return jobs


def one_by_one(pipeline: Code2WavPipeline, jobs: Sequence[WindowJob]) -> list[torch.Tensor]:
    return [pipeline.run([job])[0] for job in jobs]


@pytest.fixture(scope="module")
def in_one_pass(make_pipeline: MakePipeline, random_codes: Codes) -> tuple[torch.Tensor, torch.Tensor]:
    """203 codes and their waveform."""
    codes = random_codes(203, 0)
    [whole] = make_pipeline(0, SolverConfig()).run(windows(codes, Code2WavChunks(mode="whole"), None))
    return codes, whole


@pytest.mark.parametrize(
    ("plan", "carried_db", "stateless_db"),
    [
        (Code2WavChunks(), 49.0, 50.0),
        (Code2WavChunks(past_blocks=1), 49.0, 46.5),
        (Code2WavChunks(future_blocks=3), 105.0, 77.0),
    ],
    ids=["default", "one past block", "three future blocks"],
)
def test_a_stream_is_at_least_as_close_to_one_pass_as_two_past_blocks_bring_it(
    make_pipeline: MakePipeline,
    in_one_pass: tuple[torch.Tensor, torch.Tensor],
    plan: Code2WavChunks,
    carried_db: float,
    stateless_db: float,
) -> None:
    """Signal-to-noise ratio of the waveform against one pass over all 203 codes. With one future block it is
    the future that limits both; what is lost of the past with two past blocks is lost at 76 dB."""
    codes, whole = in_one_pass
    pipeline = make_pipeline(1, SolverConfig())
    carried = torch.cat(one_by_one(pipeline, windows(codes, plan, "a")))
    assert len(pipeline.streams.states) == 0
    by_themselves = torch.cat(one_by_one(pipeline, windows(codes, plan, None)))
    assert snr_db(carried, whole) > max(carried_db, snr_db(by_themselves, whole) - 0.1)
    assert snr_db(by_themselves, whole) < stateless_db


def test_with_all_of_the_future_a_stream_is_one_pass(
    make_pipeline: MakePipeline, random_codes: Codes
) -> None:
    """Every window sees twelve blocks behind it, so only the past could be missing."""
    codes = random_codes(24 * 12, 4)
    pipeline = make_pipeline(1, SolverConfig())
    [whole] = make_pipeline(0, SolverConfig()).run(windows(codes, Code2WavChunks(mode="whole"), None))
    jobs = windows(codes, Code2WavChunks(new_blocks=(1,), future_blocks=12), "a")
    assert len(jobs) == 13
    assert snr_db(torch.cat(one_by_one(pipeline, jobs)), whole) > 90


def test_a_stream_that_lost_its_state_is_computed_by_itself_and_carries_on(
    make_pipeline: MakePipeline, random_codes: Codes
) -> None:
    """The window behind the loss is exactly that of the same utterance without a stream; those after it carry
    on."""
    plan = Code2WavChunks(new_blocks=(1,))
    jobs = windows(random_codes(84, 2), plan, "a")
    by_themselves = one_by_one(make_pipeline(0), windows(random_codes(84, 2), plan, None))
    carried = one_by_one(make_pipeline(1), jobs)
    pipeline = make_pipeline(1)
    results = one_by_one(pipeline, jobs[:3])
    one_by_one(pipeline, windows(random_codes(60, 3), plan, "b")[:2])
    results += one_by_one(pipeline, jobs[3:])
    assert all(torch.equal(result, one) for result, one in zip(results[:3], carried[:3], strict=True))
    assert torch.equal(results[3], by_themselves[3])
    assert not torch.equal(carried[3], by_themselves[3])
    assert not torch.equal(results[4], by_themselves[4])
    restarted = one_by_one(make_pipeline(1), jobs[3:])
    assert all(torch.equal(result, one) for result, one in zip(results[3:], restarted, strict=True))


def test_a_slot_that_is_used_again_brings_nothing_of_its_last_stream(
    make_pipeline: MakePipeline, random_codes: Codes
) -> None:
    """After an end, and after a stream that was aborted and never came back."""
    plan = Code2WavChunks(new_blocks=(1,))
    jobs = windows(random_codes(60, 6), plan, "new", voice=1)
    expected = one_by_one(make_pipeline(1), jobs)
    for number_of_windows in (2, 5):
        pipeline = make_pipeline(1)
        before = windows(random_codes(60, 7), plan, "old")
        one_by_one(pipeline, before[:number_of_windows])
        assert len(pipeline.streams.states) == int(number_of_windows < len(before))
        for result, reference in zip(one_by_one(pipeline, jobs), expected, strict=True):
            assert torch.equal(result, reference)
        assert (len(pipeline.streams.states), len(pipeline.streams.free_slots)) == (0, 1)


def test_windows_that_failed_forget_their_streams(make_pipeline: MakePipeline, random_codes: Codes) -> None:
    plan = Code2WavChunks(new_blocks=(1,))
    pipeline, jobs = make_pipeline(2), windows(random_codes(60, 8), plan, "a")
    one_by_one(pipeline, jobs[:1])
    with pytest.raises(IndexError):  # in the middle of the step: a code that the model's table does not have
        pipeline.run([WindowJob(jobs[1].window, jobs[1].codes + 200, jobs[1].noise, 0)])
    assert (len(pipeline.streams.states), len(pipeline.streams.free_slots)) == (0, 2)
    by_itself = make_pipeline(0).run([windows(random_codes(60, 8), plan, None)[1]])[0]
    assert torch.equal(pipeline.run([jobs[1]])[0], by_itself)
