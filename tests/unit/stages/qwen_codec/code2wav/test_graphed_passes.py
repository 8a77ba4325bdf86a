"""Passes recorded for fixed shapes, replayed on a CPU as a CUDA graph would, against eager passes and
transformers' single pass."""

import math
import random
from dataclasses import dataclass

import pytest
import torch

from omni_server.errors import ConfigError
from stages.qwen_codec.code2wav.graphed_passes import GraphedPasses
from stages.qwen_codec.code2wav.network import Code2WavNetwork
from stages.qwen_codec.code2wav.stream_decoder import StreamDecoder
from stages.runtime.cuda_graphs import Work
from tests.reference.qwen3_code2wav import random_code2wav, small_config
from tests.unit.stages.qwen_codec.code2wav.speech import (
    Reference,
    Stream,
    advance,
    decode,
    decoder_like,
    layout_of,
    network_like,
)
from tests.unit.stages.qwen_codec.code2wav.tape import TapeRecorder
from tests.unit.stages.qwen_codec.code2wav.tts_reference import TTSReference, small_tts_config

torch.set_num_threads(1)

EXACT = 1e-12
"""Largest deviation in float64."""


@pytest.fixture(scope="module", params=["qwen3_omni", "qwen3_tts"])
def reference(request: pytest.FixtureRequest) -> Reference:
    if request.param == "qwen3_omni":
        return random_code2wav(small_config(), torch.float64)
    return TTSReference(small_tts_config(), torch.float64)


@dataclass
class Graphed:
    passes: GraphedPasses
    decoder: StreamDecoder
    recorder: TapeRecorder


def graphed(
    reference: Reference, *, num_slots: int = 6, max_num_streams: int = 6, max_frames: int = 48
) -> Graphed:
    recorder = TapeRecorder()
    passes = GraphedPasses(
        network_like(reference),
        recorder,
        num_slots=num_slots,
        max_num_streams=max_num_streams,
        max_frames=max_frames,
    )
    return Graphed(passes, StreamDecoder(passes, layout_of(reference.config)), recorder)


def fill_spare_slot(passes: GraphedPasses, value: float) -> None:
    for memory in passes.state.of_layer.values():
        assert len(memory) == passes.num_slots + 1
        memory[-1].fill_(value)


@pytest.mark.parametrize(
    ("num_slots", "max_num_streams", "max_frames"), [(6, 6, 48), (4, 3, 8)], ids=["roomy", "tight"]
)
def test_graphs_give_what_eager_passes_give(
    reference: Reference, num_slots: int, max_num_streams: int, max_frames: int
) -> None:
    """Steps of one to `max_num_streams` windows of 1 to 21 frames. Streams begin at different times; some are
    aborted, and there are more of them than slots, so that live ones lose their state as well."""
    graphs = graphed(reference, num_slots=num_slots, max_num_streams=max_num_streams, max_frames=max_frames)
    fill_spare_slot(graphs.passes, float("nan"))
    eager = decoder_like(reference, num_slots=num_slots)
    rng = random.Random(num_slots)
    waiting = [Stream(reference, rng.randint(3, 60), str(number)) for number in range(14)]
    ended: list[Stream] = []
    live: list[Stream] = []
    num_lost = num_mixed = num_aborted = 0
    while live or waiting:
        while waiting and len(live) <= num_slots:  # one more than can have state
            live.append(waiting.pop())
        step = rng.sample(live, rng.randint(1, min(max_num_streams, len(live))))
        usual = rng.choice([1, 2, 4, 8])
        sizes = [min(stream.num_left, rng.choice([usual, usual, rng.randint(1, 21)])) for stream in step]
        jobs = [stream.job(size) for stream, size in zip(step, sizes, strict=True)]
        num_lost += sum(stream.done > 0 and eager.streams.end_of(stream.name) is None for stream in step)
        num_mixed += len({stream.done == 0 for stream in step}) == 2
        results = zip(graphs.decoder.run(jobs), eager.run(jobs), strict=True)
        for stream, size, (samples, expected) in zip(step, sizes, results, strict=True):
            assert samples.shape == expected.shape
            assert float((samples - expected).abs().max()) <= EXACT
            stream.samples.append(samples)
            stream.done += size
        ended += [stream for stream in live if not stream.num_left]
        live = [stream for stream in live if stream.num_left]
        if live and rng.random() < 0.15:
            live.remove(rng.choice(live))
            num_aborted += 1
    assert min(num_lost, num_mixed, num_aborted) >= 1
    assert max(stream.error() for stream in ended) <= EXACT


@pytest.mark.parametrize("sizes", [(1,), (8, 8), (8, 1, 5), (3, 2, 7, 1)])
def test_windows_of_any_lengths_share_a_pass(reference: Reference, sizes: tuple[int, ...]) -> None:
    graphs = graphed(reference)
    streams = [Stream(reference, 20, str(number)) for number in range(len(sizes))]
    for _ in range(2):  # with and without a past
        graphs.recorder.replayed.clear()
        advance(graphs.decoder, *zip(streams, sizes, strict=True))
        assert len(graphs.recorder.replayed) == 1
    for stream in streams:
        decode(graphs.decoder, stream, (8,))
    assert max(stream.error() for stream in streams) <= EXACT


def test_no_pass_runs_eagerly(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even those that compute a lost state again."""
    graphs = graphed(reference, num_slots=1, max_num_streams=1)

    def forward(*arguments: object) -> torch.Tensor:
        raise AssertionError("an eager pass")

    monkeypatch.setattr(Code2WavNetwork, "forward", forward)
    streams = Stream(reference, 50), Stream(reference, 51, "other")
    for size in (35, 5, 4):
        for stream in streams:
            assert graphs.decoder.streams.end_of(stream.name) is None
            advance(graphs.decoder, (stream, size))
    for stream in streams:
        decode(graphs.decoder, stream, (5,))
    assert max(stream.error() for stream in streams) <= EXACT


def test_what_two_streams_begin_with_is_computed_once(reference: Reference) -> None:
    graphs = graphed(reference)
    streams = [Stream(reference, 40, name) for name in "ab"]
    num_passes = []
    for stream in streams:
        stream.done = 20
        graphs.recorder.replayed.clear()
        advance(graphs.decoder, (stream, 1))
        num_passes.append(len(graphs.recorder.replayed))
    num_past = min(20, layout_of(reference.config).context_frames)
    assert num_passes == [1 + math.ceil(num_past / 8), 1]
    for stream in streams:
        decode(graphs.decoder, stream, (8,))
    assert torch.equal(streams[0].streamed, streams[1].streamed)
    expected = streams[0].single_pass[1920 * 20 - layout_of(reference.config).lead_samples :]
    assert float((streams[0].streamed - expected).abs().max()) <= EXACT


def test_results_outlive_later_passes(reference: Reference) -> None:
    """The memory of a graph's results is written again by its next replay."""
    passes = graphed(reference).passes
    codes, places = torch.zeros(1, 2, 16, dtype=torch.int64), torch.tensor([[0, 0, 0, 2]])
    with torch.inference_mode():
        first = passes.run(codes, places)
        before = first.clone()
        assert not torch.equal(passes.run(codes + 7, torch.tensor([[0, 2, 2, 2]])), first)
    assert torch.equal(first, before)


def test_too_little_memory_for_graphs_is_a_config_error(reference: Reference) -> None:
    def recorder(work: Work) -> Work:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigError, match="no room for CUDA graphs of up to 2 streams: raise its"):
        GraphedPasses(network_like(reference), recorder, num_slots=2, max_num_streams=2, max_frames=8)
