"""Streamed audio against transformers' single pass over all codes."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from stages.qwen3_omni.code2wav.model import layout_of
from stages.qwen3_omni.code2wav.network import Code2WavNetwork
from stages.qwen3_omni.code2wav.passes import MAX_PIECE_FRAMES, EagerPasses
from stages.qwen3_omni.code2wav.state import Step, StreamState, values_per_stream
from stages.qwen3_omni.code2wav.stream_decoder import StreamDecoder
from tests.reference.qwen3_code2wav import LEVEL, random_code2wav, small_config
from tests.unit.stages.qwen3_omni.code2wav.speech import (
    Stream,
    advance,
    decode,
    decoder_like,
    network_like,
    single_pass,
)

torch.set_num_threads(1)

RAMPS = [(1,), (2,), (4,), (10,), (1, 2, 4, 8, 10), (3, 7, 1, 25), (100,)]
EXACT = 1e-12
"""Largest deviation in float64."""


@pytest.fixture(scope="module")
def reference() -> Qwen3OmniMoeCode2Wav:
    return random_code2wav(small_config(), torch.float64)


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_streamed_audio_equals_a_single_pass(reference: Qwen3OmniMoeCode2Wav, ramp: tuple[int, ...]) -> None:
    stream = Stream(reference, 60)
    decode(decoder_like(reference), stream, ramp)
    assert len(stream.streamed) == 1920 * 60 - 555
    assert stream.error() <= EXACT


@pytest.mark.parametrize("ramp", [(1,), (1, 2, 4, 8)], ids=str)
def test_streamed_audio_equals_a_single_pass_in_float32(ramp: tuple[int, ...]) -> None:
    reference = random_code2wav(small_config())
    stream = Stream(reference, 60)
    decode(decoder_like(reference), stream, ramp)
    noise = (stream.streamed - stream.single_pass).double().square().mean()
    assert 10 * math.log10(stream.single_pass.double().square().mean() / noise) > 90


def test_state_stays_exact_beyond_all_that_attention_sees() -> None:
    """The published window, with few layers."""
    reference = random_code2wav(small_config(sliding_window=72), torch.float64)
    num_frames = 72 * reference.config.num_hidden_layers + 30
    stream = Stream(reference, num_frames)
    decode(decoder_like(reference), stream, (1, 2, 4, 8))
    assert stream.error() <= EXACT


def test_a_window_longer_than_attention_is_computed_in_pieces(reference: Qwen3OmniMoeCode2Wav) -> None:
    stream = Stream(reference, 2 * MAX_PIECE_FRAMES + 3)
    decode(decoder_like(reference), stream, (3, 1000))
    assert len(stream.samples) == 2
    assert stream.error() <= EXACT


def test_query_groups_and_biases_of_attention_are_followed() -> None:
    config = small_config(num_attention_heads=4, num_key_value_heads=2, attention_bias=True)
    reference = random_code2wav(config, torch.float64)
    stream = Stream(reference, 20)
    decode(decoder_like(reference), stream, (1, 3))
    assert stream.error() <= EXACT


def test_streams_of_different_ages_share_steps(reference: Qwen3OmniMoeCode2Wav) -> None:
    """Each step has the same number of new frames for all, and some steps hold new and old streams."""
    decoder, rng = decoder_like(reference, num_slots=6), random.Random(5)
    streams = [Stream(reference, 24 + 5 * i, str(i)) for i in range(6)]
    num_mixed = 0
    for number in range(100):
        begun = [s for i, s in enumerate(streams) if number >= 3 * i and s.num_left and rng.random() < 0.8]
        size = min((s.num_left for s in begun), default=0)
        if size:
            num_mixed += len({s.done == 0 for s in begun}) == 2
            advance(decoder, *((s, min(size, rng.randint(1, 4))) for s in begun))
    assert num_mixed >= 3
    assert max(stream.error() for stream in streams) <= EXACT


def test_windows_of_different_lengths_share_steps(reference: Qwen3OmniMoeCode2Wav) -> None:
    decoder, rng = decoder_like(reference, num_slots=5, max_frames_per_pass=8), random.Random(6)
    streams = [Stream(reference, 30 + i, str(i)) for i in range(5)]
    while left := [stream for stream in streams if stream.num_left]:
        advance(decoder, *((stream, rng.randint(1, 12)) for stream in left))
    assert max(stream.error() for stream in streams) <= EXACT


@pytest.mark.parametrize("num_before", [1, 10, 50])
def test_a_lost_state_is_computed_again_from_the_codes(
    reference: Qwen3OmniMoeCode2Wav, num_before: int
) -> None:
    """With one slot, each stream evicts the other. 50 frames are more than the state depends on."""
    assert layout_of(reference.config).context_frames < 50
    decoder = decoder_like(reference, num_slots=1)
    stream, other = Stream(reference, num_before + 12), Stream(reference, num_before + 11, "other")
    for size in (num_before, 1, 4):
        for each in (stream, other):
            assert decoder.streams.end_of(each.name) is None
            advance(decoder, (each, size))
    decode(decoder, stream, (3,))
    decode(decoder, other, (3,))
    assert max(stream.error(), other.error()) <= EXACT


def test_streams_with_and_without_state_share_steps(reference: Qwen3OmniMoeCode2Wav) -> None:
    decoder, rng = decoder_like(reference, num_slots=3), random.Random(7)
    streams = [Stream(reference, 70 + i, str(i)) for i in range(5)]
    while left := [stream for stream in streams if stream.num_left]:
        advance(decoder, *((stream, rng.choice([2, 4])) for stream in rng.sample(left, min(3, len(left)))))
    assert max(stream.error() for stream in streams) <= EXACT


def test_audio_depends_on_as_many_earlier_frames_as_the_layout_says(reference: Qwen3OmniMoeCode2Wav) -> None:
    codes = Stream(reference, 60).codes
    num_context = layout_of(reference.config).context_frames
    other = codes.clone()
    other[0] = (other[0] + 1) % reference.config.codebook_size
    difference = (single_pass(reference, other) - single_pass(reference, codes)).abs()
    first_unchanged = 1920 * (num_context + 1) - 555
    assert float(difference[first_unchanged:].max()) <= EXACT
    assert float(difference[first_unchanged - 1920 : first_unchanged].max()) > EXACT


def test_25_frames_of_context_instead_of_the_state_give_other_audio() -> None:
    """Why the decoder keeps state: this is what windows with a left context give (HF's `chunked_decode`)."""
    reference = random_code2wav(small_config(sliding_window=72), torch.float64)
    stream = Stream(reference, 120)
    begin, end = 100, 110
    approximate = single_pass(reference, stream.codes[begin - 25 : end])[-1920 * (end - begin) :]
    exact = stream.single_pass[1920 * begin - 555 : 1920 * end - 555]
    assert float((approximate - exact).abs().max()) > LEVEL / 2


def test_an_aborted_stream_leaves_nothing_in_its_slot(reference: Qwen3OmniMoeCode2Wav) -> None:
    """Not even values that are not finite."""
    passes = EagerPasses(network_like(reference), num_slots=1, max_frames=256)
    decoder = StreamDecoder(passes, layout_of(reference.config))
    advance(decoder, (Stream(reference, 40, "aborted"), 20))
    for memory in passes.state.of_layer.values():
        memory.fill_(float("nan"))
    stream = Stream(reference, 20)
    decode(decoder, stream, (1, 2, 4))
    assert stream.error() <= EXACT


def failing_at_the_end(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def fails(*arguments: object) -> torch.Tensor:
        forward(*arguments)
        raise RuntimeError("out of memory")

    return fails


def test_a_failed_step_loses_the_state_but_no_audio(
    reference: Qwen3OmniMoeCode2Wav, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_like(reference, num_slots=2)
    streams = Stream(reference, 30), Stream(reference, 31, "b")
    advance(decoder, *((stream, 5) for stream in streams))
    monkeypatch.setattr(Code2WavNetwork, "forward", failing_at_the_end(Code2WavNetwork.forward))
    with pytest.raises(RuntimeError, match="out of memory"):
        advance(decoder, *((stream, 5) for stream in streams))
    monkeypatch.undo()
    assert decoder.streams.num_free_slots == 2
    for stream in streams:
        decode(decoder, stream, (5,))
    assert max(stream.error() for stream in streams) <= EXACT


def test_two_windows_of_one_stream_in_a_step_are_refused(reference: Qwen3OmniMoeCode2Wav) -> None:
    decoder, stream = decoder_like(reference), Stream(reference, 10)
    with pytest.raises(ValueError, match="two windows of one stream"):
        decoder.run([stream.job(2), stream.job(2)])
    decode(decoder, stream, (2,))
    assert stream.error() <= EXACT


def test_memory_is_that_of_the_published_sizes() -> None:
    with torch.device("meta"):
        network = Code2WavNetwork(Qwen3OmniMoeCode2WavConfig())
    assert sum(p.numel() for p in network.parameters()) == 216_016_577
    kv = 8 * 2 * 71 * 1024
    convolutions = 6 * 1024 * 3 + 78 * (768 + 384 + 192 + 96) + (1536 + 768 + 384 + 192) + 6 * 96
    assert values_per_stream(network) == kv + convolutions


def test_memory_does_not_grow(reference: Qwen3OmniMoeCode2Wav) -> None:
    passes = EagerPasses(network_like(reference), num_slots=2, max_frames=256)
    decoder = StreamDecoder(passes, layout_of(reference.config))
    before = [memory.data_ptr() for memory in passes.state.of_layer.values()]
    for number in range(20):  # none ends
        advance(decoder, (Stream(reference, 12, str(number)), 4))
    assert [memory.data_ptr() for memory in passes.state.of_layer.values()] == before
    assert {memory.shape[0] for memory in passes.state.of_layer.values()} == {2}


def test_the_network_reads_no_value_on_the_host() -> None:
    """As CUDA graphs require. Tensors of the meta device have no values to read."""
    with torch.device("meta"):
        network = Code2WavNetwork(small_config())
        numbers = torch.zeros(3, dtype=torch.int64)
        step = Step(StreamState(network, 5), slots=numbers, positions=numbers, num_known=numbers)
        samples = network(torch.zeros(3, 4, 16, dtype=torch.int64), step)
    assert samples.shape == (3, 4 * 1920)
