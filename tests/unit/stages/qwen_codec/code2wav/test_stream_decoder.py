"""Streamed audio against transformers' single pass over all codes."""

import sys
from dataclasses import dataclass

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


class CountedPasses(Passes):
    """Counts the frames that are computed, and can fail."""

    num_frames = 0
    fails_after = sys.maxsize
    """So many frames are computed, and no more."""

    def run(self, codes: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        self.num_frames += codes.shape[:2].numel()
        rows = super().run(codes, places)
        if self.num_frames > self.fails_after:
            raise RuntimeError("the device failed")
        return rows


@dataclass
class Counted:
    passes: CountedPasses
    decoder: StreamDecoder

    def num_frames(self, *streams: Stream) -> int:
        """Decodes a window of 2 frames for each stream in one step. Returns how many frames that takes."""
        before = self.passes.num_frames
        advance(self.decoder, *((stream, 2) for stream in streams))
        return self.passes.num_frames - before


def counted(reference: Reference, *, num_slots: int = 6) -> Counted:
    passes = CountedPasses(network_like(reference), num_slots=num_slots, max_frames=256)
    return Counted(passes, StreamDecoder(passes, layout_of(reference.config)))


NUM_BEFORE = 9
"""Frames of a cloned voice."""


def cloned(reference: Reference, name: str, *, num_before: int = NUM_BEFORE) -> Stream:
    """A stream of 60 frames that says something else than others after `num_before` frames that all share."""
    stream = Stream(reference, 60, name)
    stream.done = num_before
    stream.codes[num_before:] = (stream.codes[num_before:] + ord(name)) % reference.config.codebook_size
    return stream


def alone(reference: Reference, name: str, *, num_before: int = NUM_BEFORE) -> torch.Tensor:
    """The audio of `cloned` where no other stream was before."""
    counts, stream = counted(reference), cloned(reference, name, num_before=num_before)
    counts.num_frames(stream)
    decode(counts.decoder, stream, (3,))
    return stream.streamed


@pytest.mark.parametrize("num_before", [1, NUM_BEFORE, 50])
def test_what_many_streams_begin_with_is_computed_once(reference: Reference, num_before: int) -> None:
    """50 frames are more than the state depends on."""
    counts = counted(reference)
    num_past = min(num_before, layout_of(reference.config).context_frames)
    streams = [cloned(reference, name, num_before=num_before) for name in "abc"]
    assert [counts.num_frames(stream) for stream in streams] == [num_past + 2, 2, 2]
    for stream in streams:
        decode(counts.decoder, stream, (3,))
        assert torch.equal(stream.streamed, alone(reference, stream.name, num_before=num_before))


def test_streams_of_one_step_may_begin_with_the_same_frames(reference: Reference) -> None:
    counts = counted(reference)
    first, second = ([cloned(reference, name) for name in names] for names in ("ab", "cd"))
    assert counts.num_frames(*first) == NUM_BEFORE + 4
    assert counts.num_frames(*second) == 4
    for stream in (*first, *second):
        decode(counts.decoder, stream, (3,))
        assert float((stream.streamed - alone(reference, stream.name)).abs().max()) <= EXACT


def test_other_frames_at_the_beginning_are_computed(reference: Reference) -> None:
    counts = counted(reference)
    other = cloned(reference, "b")
    other.codes[0] = (other.codes[0] + 1) % reference.config.codebook_size
    expected = single_pass(reference, other.codes)[
        1920 * NUM_BEFORE - layout_of(reference.config).lead_samples :
    ]
    assert counts.num_frames(cloned(reference, "a")) == counts.num_frames(other) == NUM_BEFORE + 2
    decode(counts.decoder, other, (3,))
    assert float((other.streamed - expected).abs().max()) <= EXACT


@pytest.mark.parametrize("num_slots", [1, 2])
def test_with_too_few_slots_streams_compute_on_their_own_what_they_begin_with(
    reference: Reference, num_slots: int
) -> None:
    counts = counted(reference, num_slots=num_slots)
    for names in ("a", "bc")[:num_slots]:
        streams = [cloned(reference, name) for name in names]
        assert counts.num_frames(*streams) == len(streams) * (NUM_BEFORE + 2)
        for stream in streams:
            decode(counts.decoder, stream, (3,))
            assert float((stream.streamed - alone(reference, stream.name)).abs().max()) <= EXACT


@pytest.mark.parametrize("fails_after", [0, NUM_BEFORE], ids=["in the past", "behind it"])
def test_after_a_failure_the_beginning_is_computed_again(reference: Reference, fails_after: int) -> None:
    counts = counted(reference)
    stream = cloned(reference, "a")
    counts.passes.fails_after = fails_after
    with pytest.raises(RuntimeError, match="the device failed"):
        counts.num_frames(stream)
    counts.passes.fails_after = sys.maxsize
    for memory in counts.passes.state.of_layer.values():
        memory.fill_(float("nan"))
    assert counts.num_frames(stream) == NUM_BEFORE + 2
    decode(counts.decoder, stream, (3,))
    assert torch.equal(stream.streamed, alone(reference, "a"))


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
