"""Streamed audio against transformers' single pass over all codes."""

import pytest
import torch

from stages.qwen_codec.code2wav.passes import MAX_PASS_FRAMES, Passes
from stages.qwen_codec.code2wav.stream_decoder import StreamDecoder
from tests.reference.qwen3_code2wav import random_code2wav, small_config
from tests.unit.stages.qwen_codec.code2wav.speech import (
    Reference,
    Stream,
    advance,
    decode,
    decoder_like,
    layout_of,
    network_like,
    single_pass,
)
from tests.unit.stages.qwen_codec.code2wav.tts_reference import TTSReference, small_tts_config

torch.set_num_threads(1)

RAMPS = [(1,), (1, 2, 4, 8, 10), (3, 7, 1, 25), (100,)]
EXACT = 1e-12
"""Largest deviation in float64."""


@pytest.fixture(scope="module", params=["qwen3_omni", "qwen3_tts"])
def reference(request: pytest.FixtureRequest) -> Reference:
    if request.param == "qwen3_omni":
        return random_code2wav(small_config(), torch.float64)
    return TTSReference(small_tts_config(), torch.float64)


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_streamed_audio_equals_a_single_pass(reference: Reference, ramp: tuple[int, ...]) -> None:
    stream = Stream(reference, 60)
    decode(decoder_like(reference), stream, ramp)
    assert len(stream.streamed) == 1920 * 60 - layout_of(reference.config).lead_samples
    assert stream.error() <= EXACT


def test_state_stays_exact_beyond_all_that_attention_sees() -> None:
    """The published window, with few layers."""
    reference = random_code2wav(small_config(sliding_window=72), torch.float64)
    num_frames = 72 * reference.config.num_hidden_layers + 30
    stream = Stream(reference, num_frames)
    decode(decoder_like(reference), stream, (1, 2, 4, 8))
    assert stream.error() <= EXACT


def test_a_window_longer_than_attention_is_computed_in_several_passes(reference: Reference) -> None:
    stream = Stream(reference, 2 * MAX_PASS_FRAMES + 3)
    decode(decoder_like(reference), stream, (3, 1000))
    assert len(stream.samples) == 2
    assert stream.error() <= EXACT


def test_query_groups_and_biases_of_attention_are_followed() -> None:
    config = small_config(num_attention_heads=4, num_key_value_heads=2, attention_bias=True)
    reference = random_code2wav(config, torch.float64)
    stream = Stream(reference, 20)
    decode(decoder_like(reference), stream, (1, 3))
    assert stream.error() <= EXACT


@pytest.mark.parametrize("num_before", [1, 10, 50])
def test_a_lost_state_is_computed_again_from_the_codes(reference: Reference, num_before: int) -> None:
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


def test_audio_depends_on_as_many_earlier_frames_as_the_layout_says(reference: Reference) -> None:
    codes = Stream(reference, 60).codes
    layout = layout_of(reference.config)
    num_context = layout.context_frames
    other = codes.clone()
    other[0] = (other[0] + 1) % reference.config.codebook_size
    difference = (single_pass(reference, other) - single_pass(reference, codes)).abs()
    first_unchanged = 1920 * (num_context + 1) - layout.lead_samples
    assert float(difference[first_unchanged:].max()) <= EXACT
    assert float(difference[first_unchanged - 1920 : first_unchanged].max()) > EXACT


def test_a_stream_that_begins_after_other_frames_gives_the_audio_behind_them(reference: Reference) -> None:
    """As for a voice that is cloned from reference audio: nobody hears the reference again."""
    stream = Stream(reference, 60)
    stream.done = num_before = 50
    decode(decoder_like(reference), stream, (1, 2, 4, 8))
    expected = stream.single_pass[1920 * num_before - layout_of(reference.config).lead_samples :]
    assert stream.streamed.shape == expected.shape
    assert float((stream.streamed - expected).abs().max()) <= EXACT


def test_an_aborted_stream_leaves_nothing_in_its_slot(reference: Reference) -> None:
    """Not even values that are not finite."""
    passes = Passes(network_like(reference), num_slots=1, max_frames=256)
    decoder = StreamDecoder(passes, layout_of(reference.config))
    advance(decoder, (Stream(reference, 40, "aborted"), 20))
    for memory in passes.state.of_layer.values():
        memory.fill_(float("nan"))
    stream = Stream(reference, 20)
    decode(decoder, stream, (1, 2, 4))
    assert stream.error() <= EXACT
