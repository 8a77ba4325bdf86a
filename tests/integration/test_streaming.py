"""Speech is streamed: while the reply is still being written, without gaps, and close to one pass over all of it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omni_server.types import AudioDelta, CodecDelta, Finished, OmniEvent, SamplingConfig, TextDelta, TextDone
from tests.integration.live import LiveOmni, demo_config, spoken
from tests.integration.parity import expected, same_tokens, signal_to_noise_db
from tests.reference.cases import CASES
from tests.reference.reference import Reference

CHUNKED_SNR_DB = 50.0
"""Of streamed sound against one pass with the same noise, on the demo checkpoint's random weights; measured: 57.5 to
59.1 dB. A window sees two blocks before and one behind what it emits; the reference sees all."""


@pytest.fixture(scope="module")
def streaming(checkpoint: Path) -> Iterator[LiveOmni]:
    """The demo config as it is shipped."""
    live = LiveOmni(checkpoint, demo_config())
    yield live
    live.close()


@pytest.fixture(scope="module")
def long_reply(streaming: LiveOmni) -> list[OmniEvent]:
    return streaming.events(
        spoken(
            CASES["tell"].messages,
            thinker=SamplingConfig(temperature=0.0, max_tokens=240, min_tokens=240, ignore_eos=True),
            talker=SamplingConfig(temperature=0.0, max_tokens=300, min_tokens=300),
        )
    )


def test_the_first_audio_comes_before_the_last_text(long_reply: list[OmniEvent]) -> None:
    """Order, not time."""
    first_audio = next(i for i, event in enumerate(long_reply) if isinstance(event, AudioDelta))
    last_text = max(i for i, event in enumerate(long_reply) if isinstance(event, TextDelta))
    assert first_audio < last_text


def test_events_end_with_the_usage(long_reply: list[OmniEvent]) -> None:
    finished = long_reply[-1]
    assert isinstance(finished, Finished)
    assert finished.usage.text_tokens == sum(len(e.token_ids) for e in long_reply if isinstance(e, TextDelta)) == 240
    assert finished.usage.codec_tokens == sum(len(e.codes) for e in long_reply if isinstance(e, CodecDelta)) == 300
    assert [event for event in long_reply if isinstance(event, TextDone)] == [TextDone("length")]


def test_codes_leave_the_talker_in_blocks(long_reply: list[OmniEvent]) -> None:
    """Windows end where blocks do, so that nothing waits for codes that are kept back."""
    ends = np.cumsum([len(event.codes) for event in long_reply if isinstance(event, CodecDelta)])
    assert len(ends) > 1
    assert not (ends % 12).any()


def test_the_end_tells_when_each_stage_was_passed(long_reply: list[OmniEvent]) -> None:
    finished = long_reply[-1]
    assert isinstance(finished, Finished)
    times = finished.times
    speech = [times.talker_opened_s, times.first_codes_s, times.first_window_s, times.first_audio_s, times.last_audio_s]
    known = [moment for moment in speech if moment is not None]
    assert len(known) == len(speech)
    assert sorted(known) == known
    assert times.num_windows == sum(isinstance(event, AudioDelta) for event in long_reply)


def test_audio_is_contiguous_and_covers_every_code(long_reply: list[OmniEvent]) -> None:
    position = 0
    for event in long_reply:
        if isinstance(event, AudioDelta):
            assert event.first_sample == position
            position += len(event.samples)
    assert position == 300 * 480


@pytest.mark.parametrize("name", ["hello", "count", "image", "two_turns_ethan", "long_reply"])
def test_streamed_sound_is_close_to_one_pass_over_the_utterance(
    name: str, streaming: LiveOmni, reference: Reference
) -> None:
    want = expected(reference, CASES[name])
    answer = streaming.answer(want.request)
    same_tokens(answer, want)
    snr = signal_to_noise_db(want.result.waveform, answer.audio)
    assert snr > CHUNKED_SNR_DB, f"{snr:.1f} dB over {len(answer.codes)} codes"


def test_windows_do_not_click_where_they_meet(long_reply: list[OmniEvent]) -> None:
    """The step between the last sample of a window and the first of the next is no larger than steps elsewhere."""
    pieces = [event.samples for event in long_reply if isinstance(event, AudioDelta)]
    steps = np.abs(np.diff(np.concatenate(pieces)))
    seams = np.cumsum([len(piece) for piece in pieces])[:-1] - 1
    assert steps[seams].max() <= np.quantile(steps, 0.999)
