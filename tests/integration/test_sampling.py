"""Lengths, end tokens, stop strings and seeds act on the stage they name."""

import numpy as np
import pytest

from omni_server.errors import InvalidRequestError
from omni_server.types import CodecDelta, SamplingConfig, TextDelta, TextDone
from tests.integration.live import LiveOmni, spoken
from tests.reference.cases import CASES

HELLO = CASES["hello"].messages
GREEDY = SamplingConfig(temperature=0.0, max_tokens=40)


def test_the_talker_says_exactly_as_much_as_it_must(whole: LiveOmni) -> None:
    """`ignore_eos` bars the ids that end speech, and ids without sound stay barred."""
    answer = whole.answer(
        spoken(HELLO, thinker=GREEDY, talker=SamplingConfig(max_tokens=250, ignore_eos=True, seed=1))
    )
    assert len(answer.codes) == 250
    assert len(answer.audio) == 250 * 480
    assert answer.finish_reason == "length"
    assert max(answer.codes) < 8194


def test_min_tokens_keeps_the_talker_from_ending_early(whole: LiveOmni) -> None:
    for seed in range(4):
        talker = SamplingConfig(temperature=1.0, min_tokens=90, max_tokens=120, seed=seed)
        answer = whole.answer(spoken(HELLO, thinker=GREEDY, talker=talker))
        assert 90 <= len(answer.codes) <= 120


def test_the_thinker_writes_exactly_as_much_as_it_must(whole: LiveOmni) -> None:
    thinker = SamplingConfig(temperature=0.0, min_tokens=64, max_tokens=64, ignore_eos=True)
    answer = whole.answer(spoken(HELLO, thinker=thinker))
    assert len(answer.token_ids) == 64
    assert answer.usage.text_tokens == 64


def test_the_same_seeds_give_the_same_speech(whole: LiveOmni) -> None:
    def ask(seed: int) -> tuple[tuple[int, ...], np.ndarray]:
        sampling = SamplingConfig(temperature=1.0, max_tokens=30, seed=seed)
        talker = SamplingConfig(temperature=1.0, max_tokens=60, min_tokens=20, seed=seed)
        answer = whole.answer(spoken(HELLO, thinker=sampling, talker=talker, noise_seed=seed))
        return answer.codes, answer.audio

    first, again, other = ask(3), ask(3), ask(4)
    assert first[0] == again[0]
    np.testing.assert_array_equal(first[1], again[1])
    assert first[0] != other[0]


def test_text_cut_by_a_stop_string_is_not_spoken(whole: LiveOmni) -> None:
    """The talker hears the same reply as from a thinker that ended right before the stop string."""
    full = whole.answer(spoken(HELLO, thinker=GREEDY))
    words = full.text.split()
    stop = next(word for word in words[6:] if full.text.count(word) == 1)
    kept = full.text[: full.text.index(stop)]
    events = whole.events(spoken(HELLO, thinker=SamplingConfig(temperature=0.0, max_tokens=40, stop=(stop,))))
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == kept
    assert TextDone("stop") in events
    codes = tuple(code for event in events if isinstance(event, CodecDelta) for code in event.codes)
    # A length stop after k + 1 tokens leaves the last one unspoken: the talker hears the same k.
    num_tokens = next(
        n for n in range(1, 40) if len(whole.omni.detokenize(full.token_ids[:n])) >= len(kept.rstrip())
    )
    plain = whole.answer(spoken(HELLO, thinker=SamplingConfig(temperature=0.0, max_tokens=num_tokens + 1)))
    assert codes == plain.codes


def test_a_prompt_that_is_too_long_is_refused_before_it_starts(whole: LiveOmni) -> None:
    messages = CASES["hello"].messages[:1] * 500 + CASES["hello"].messages[1:]
    with pytest.raises(InvalidRequestError, match="maximum context length") as error:
        whole.answer(spoken(messages))
    assert error.value.code == "context_length_exceeded"
    assert whole.omni.num_running == 0


def test_an_answer_that_cannot_fit_is_refused(whole: LiveOmni) -> None:
    with pytest.raises(InvalidRequestError) as error:
        whole.answer(spoken(HELLO, thinker=SamplingConfig(max_tokens=100_000)))
    assert error.value.code == "context_length_exceeded"
    assert error.value.param == "max_completion_tokens"


def test_an_unknown_voice_and_an_unknown_stage_are_refused(whole: LiveOmni) -> None:
    with pytest.raises(InvalidRequestError, match="Chelsie") as error:
        whole.answer(spoken(HELLO, "Nobody"))
    assert error.value.param == "audio.voice"
    request = spoken(HELLO)
    request.sampling["vocoder"] = SamplingConfig()  # type: ignore[index]
    with pytest.raises(InvalidRequestError, match="vocoder"):
        whole.answer(request)
