"""The code2wav stage in a real vLLM engine on the CPU, on the demo checkpoint."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_args import diffusion_engine_args
from omni_server.errors import StageError
from stages.codec_chunking import CodecChunker
from stages.qwen2_5_omni.code2wav.noise import noise_frames
from stages.qwen2_5_omni.codec_window import CodecWindow
from stages.qwen2_5_omni.hf_overrides import code2wav_config
from stages.qwen2_5_omni.options import Code2WavChunks, Code2WavStage, SolverConfig
from stages.qwen2_5_omni.talker_to_code2wav import codec_window
from tests.integration.engines import CPU_ENVIRONMENT, diffusion_engine

SOLVER = SolverConfig(num_steps=6)
TABLE_SIZE = 8194
NUM_STREAMS = 10
"""Streams whose state the engine keeps."""
Waveform = npt.NDArray[np.float32]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def code2wav(other_sizes: Path) -> AsyncIterator[DiffusionHandle]:
    with pytest.MonkeyPatch.context() as environment, tempfile.TemporaryDirectory(prefix="t-") as folder:
        for name, value in CPU_ENVIRONMENT.items():
            environment.setenv(name, value)
        stage = Code2WavStage(
            engine="diffusion",
            model_stage="code2wav",
            max_model_len=256,
            max_num_seqs=8,
            max_streams=NUM_STREAMS,
            solver=SOLVER,
        )
        arguments = diffusion_engine_args(
            other_sizes,
            stage,
            platform="cpu",
            load_format="auto",
            hf_overrides=code2wav_config,
            carries_state=True,
        )
        handle = await diffusion_engine("code2wav", arguments, Path(folder))
        try:
            yield handle
        finally:
            await handle.shutdown()


class BareModel:
    """transformers' token2wav on the same weights, started from the same noise."""

    def __init__(self, checkpoint: Path) -> None:
        torch.set_num_threads(1)
        config = AutoConfig.from_pretrained(checkpoint).token2wav_config
        self.model = Qwen2_5OmniToken2WavModel(config).eval()
        weights = load_file(checkpoint / "model.safetensors")
        own = {k.removeprefix("token2wav."): w for k, w in weights.items() if k.startswith("token2wav.")}
        self.model.load_state_dict(own)
        self.voices = torch.load(checkpoint / "spk_dict.pt", weights_only=True)

    @torch.no_grad()
    def waveform(self, codes: tuple[int, ...], window: CodecWindow) -> Waveform:
        frames = range(2 * window.first_code, 2 * (window.first_code + len(codes)))
        noise = torch.from_numpy(noise_frames(window.noise_seed, frames.start, len(frames), 80))[None]
        voice = self.voices[window.voice]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randn", lambda *_, **__: noise.clone())
            mel = self.model.code2wav_dit_model.sample(
                voice["cond"], voice["ref_mel"], torch.tensor([codes]), num_steps=SOLVER.num_steps
            )
        emit_start, emit_end = 2 * window.emit_start - frames.start, 2 * window.emit_end - frames.start
        start = max(0, emit_start - window.vocoder_margin_frames)
        end = min(len(frames), emit_end + window.vocoder_margin_frames)
        sound = self.model.code2wav_bigvgan_model(mel[:, :, start:end])
        waveform: Waveform = sound[240 * (emit_start - start) :][: 240 * (emit_end - emit_start)].numpy()
        return waveform


@pytest.fixture(scope="module")
def bare_model(other_sizes: Path) -> BareModel:
    return BareModel(other_sizes)


def random_codes(number: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, TABLE_SIZE, number).tolist())


def whole(number: int, *, voice: str = "Chelsie", seed: int = 0) -> CodecWindow:
    return CodecWindow(voice, seed, 0, 0, number, 20, True)


def assert_close(result: Waveform, expected: Waveform) -> None:
    """Signal-to-noise ratio above 60 dB."""
    assert result.dtype == np.float32
    assert result.shape == expected.shape
    noise, signal = np.square(result - expected).sum(), np.square(expected).sum()
    assert signal > 0
    assert noise < 1e-6 * signal


_numbers = iter(range(10**6))


async def run(client: DiffusionHandle, codes: tuple[int, ...], window: CodecWindow) -> Waveform:
    return await client.run(f"r{next(_numbers)}", codes, window.encode())


@pytest.mark.asyncio(loop_scope="module")
async def test_concurrent_windows_of_mixed_lengths_equal_the_bare_model(
    code2wav: DiffusionHandle, bare_model: BareModel
) -> None:
    lengths = [1, 60, 60, 13, 24, 200, 7, 60, 2]
    jobs = [
        (random_codes(number, i), whole(number, voice=("Chelsie", "Ethan")[i % 2], seed=i // 3))
        for i, number in enumerate(lengths)
    ]
    results = await asyncio.gather(*[run(code2wav, codes, window) for codes, window in jobs])
    expected = [bare_model.waveform(codes, window) for codes, window in jobs]
    for result, waveform, number in zip(results, expected, lengths, strict=True):
        assert len(result) == 480 * number
        assert_close(result, waveform)
    assert not np.allclose(expected[1], expected[2], atol=0.01)


Spans = list[tuple[tuple[int, ...], CodecWindow]]


def spans_of(codes: tuple[int, ...], *, stream: str | None, seed: int = 0) -> Spans:
    plan = Code2WavChunks(new_blocks=(1, 2))
    chunker = CodecChunker(plan, 12)
    windows = [*chunker.push(codes), *chunker.finish()]
    return [(w.frames, codec_window(w, plan, voice="Ethan", noise_seed=seed, stream=stream)) for w in windows]


async def one_by_one(client: DiffusionHandle, spans: Spans) -> list[Waveform]:
    return [await run(client, codes, span) for codes, span in spans]


def deviation(result: Waveform, expected: Waveform) -> float:
    assert result.shape == expected.shape
    return float(np.square(result - expected).sum() / np.square(expected).sum())


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stream_that_carries_state_is_no_further_from_one_pass_and_needs_no_past_codes(
    code2wav: DiffusionHandle,
) -> None:
    codes = random_codes(131, 78)
    in_one = await run(code2wav, codes, whole(131, voice="Ethan"))
    by_themselves = await one_by_one(code2wav, spans_of(codes, stream=None))
    carried = await one_by_one(code2wav, spans_of(codes, stream="one"))
    far = deviation(np.concatenate(by_themselves), in_one)
    assert deviation(np.concatenate(carried), in_one) < min(1e-3, 1.1 * far)
    without_past: Spans = []
    for window_codes, span in spans_of(codes, stream="two"):
        num_past = span.emit_start - span.first_code
        without_past.append(((0,) * num_past + window_codes[num_past:], span))
    for result, expected in zip(await one_by_one(code2wav, without_past), carried, strict=True):
        assert_close(result, expected)


@pytest.mark.asyncio(loop_scope="module")
async def test_streams_side_by_side_equal_each_alone_as_long_as_all_have_a_place(
    code2wav: DiffusionHandle,
) -> None:
    streams = [random_codes(60 + 13 * n, n) for n in range(NUM_STREAMS)]
    alone = [
        await one_by_one(code2wav, spans_of(c, stream=f"alone-{n}", seed=n)) for n, c in enumerate(streams)
    ]
    together = await asyncio.gather(
        *[one_by_one(code2wav, spans_of(c, stream=f"together-{n}", seed=n)) for n, c in enumerate(streams)]
    )
    for results, expected in zip(together, alone, strict=True):
        for result, reference in zip(results, expected, strict=True):
            assert_close(result, reference)


@pytest.mark.asyncio(loop_scope="module")
async def test_windows_of_one_stream_at_once_fail_or_are_computed_but_never_wrong(
    code2wav: DiffusionHandle,
) -> None:
    """The server sends none; whoever does is told, and gets no sound that is not the window's."""
    codes = random_codes(96, 9)
    in_one = await run(code2wav, codes, whole(96, voice="Ethan"))
    results = await asyncio.gather(
        *[run(code2wav, own, span) for own, span in spans_of(codes, stream="hasty")], return_exceptions=True
    )
    assert any(isinstance(result, StageError) and "in the same step" in result.message for result in results)
    for (_, span), result in zip(spans_of(codes, stream="hasty"), results, strict=True):
        if isinstance(result, np.ndarray):
            assert deviation(result, in_one[480 * span.emit_start : 480 * span.emit_end]) < 1e-3


@pytest.mark.asyncio(loop_scope="module")
async def test_more_streams_than_places_and_streams_that_are_aborted_cost_exactness_only(
    code2wav: DiffusionHandle,
) -> None:
    streams = [random_codes(60, n) for n in range(2 * NUM_STREAMS)]
    speaking = [
        asyncio.create_task(one_by_one(code2wav, spans_of(c, stream=f"many-{n}", seed=n)))
        for n, c in enumerate(streams)
    ]
    await asyncio.wait(speaking, timeout=1.0)
    for task in speaking[::3]:
        task.cancel()
    results = await asyncio.gather(*speaking, return_exceptions=True)
    for n, result in enumerate(results):
        if isinstance(result, asyncio.CancelledError):
            continue
        assert isinstance(result, list)
        in_one = await run(code2wav, streams[n], whole(60, voice="Ethan", seed=n))
        assert deviation(np.concatenate(result), in_one) < 1e-3
    codes = random_codes(60, 1)
    alone = await one_by_one(code2wav, spans_of(codes, stream="after-1"))
    again = await one_by_one(code2wav, spans_of(codes, stream="after-2"))
    for waveform, expected in zip(again, alone, strict=True):
        assert_close(waveform, expected)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_new_streams_window_is_computed_before_queued_ones_that_are_due_later(
    code2wav: DiffusionHandle,
) -> None:
    """A step takes 8 windows. 40 are sent in the reverse order of their deadlines, and then one that is due
    at once."""
    finished: list[int] = []

    async def compute(due: int, num_codes: int) -> None:
        payload = whole(num_codes).encode()
        await code2wav.run(f"due-{due}", random_codes(num_codes, due), payload, priority=due)
        finished.append(due)

    assert code2wav.pid is not None
    os.kill(code2wav.pid, signal.SIGSTOP)
    queued = [asyncio.create_task(compute(due, 72)) for due in range(40, 0, -1)]
    await asyncio.sleep(0.5)  # all are sent
    os.kill(code2wav.pid, signal.SIGCONT)
    await asyncio.wait(queued, return_when=asyncio.FIRST_COMPLETED)
    os.kill(code2wav.pid, signal.SIGSTOP)
    await asyncio.sleep(0.5)  # what has been computed is here
    num_before = len(finished)
    new = asyncio.create_task(compute(0, 24))
    await asyncio.sleep(0.5)
    os.kill(code2wav.pid, signal.SIGCONT)
    await asyncio.gather(*queued, new)

    assert finished.index(0) < num_before + 16, "behind the step that runs"
    rest = [due for due in finished[num_before + 8 :] if due]
    assert rest == sorted(rest), "the queue itself is in the order of deadlines, not of arrival"


GOOD = whole(30)
BAD: list[tuple[tuple[int, ...], CodecWindow, str]] = [
    (
        random_codes(30, 0),
        msgspec.structs.replace(GOOD, voice="Nobody"),
        "no voice 'Nobody'; voices are Chelsie, Ethan",
    ),
    (random_codes(30, 0), msgspec.structs.replace(GOOD, voice="ethan"), "no voice 'ethan'"),
    ((1, 2, TABLE_SIZE), whole(3), str(TABLE_SIZE)),
    ((1, 2, 10**9), whole(3), str(10**9)),
    ((1, 2, -1), whole(3), "-1"),
    ((), whole(1), "empty"),
    (random_codes(257, 0), whole(257), "256"),
    (random_codes(30, 0), msgspec.structs.replace(GOOD, emit_end=31), "outside the window 0 to 30"),
    (random_codes(30, 0), msgspec.structs.replace(GOOD, emit_end=2**31), "outside the window 0 to 30"),
    (random_codes(30, 0), msgspec.structs.replace(GOOD, emit_start=-12), "emit_start -12"),
    (random_codes(30, 0), msgspec.structs.replace(GOOD, first_code=7), "first_code is 7"),
]


@pytest.mark.asyncio(loop_scope="module")
async def test_bad_requests_fail_alone_and_the_engine_lives_on(
    code2wav: DiffusionHandle, bare_model: BareModel
) -> None:
    good = [(random_codes(30, i), whole(30, seed=i)) for i in range(len(BAD))]
    tasks = []
    for (bad_codes, bad_window, _), (codes, window) in zip(BAD, good, strict=True):
        tasks += [run(code2wav, bad_codes, bad_window), run(code2wav, codes, window)]
    tasks.append(code2wav.run("junk", (1, 2, 3), b"junk"))
    *results, junk = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(junk, StageError)
    assert "not a codec window" in junk.message
    for (_, _, message), failure in zip(BAD, results[::2], strict=True):
        assert isinstance(failure, Exception), message
        assert message in str(failure)
    for (codes, window), result in zip(good, results[1::2], strict=True):
        assert isinstance(result, np.ndarray)
        assert_close(result, bare_model.waveform(codes, window))
    assert not code2wav.is_dead
    codes = random_codes(12, 5)
    assert_close(await run(code2wav, codes, whole(12)), bare_model.waveform(codes, whole(12)))
