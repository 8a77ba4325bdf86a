"""When the talker's codes are expected."""

import pytest

from omni_server.orchestrator.talker_pace import TalkerPace

BLOCK = 12


def utterance(pace: TalkerPace, block_s: list[float]) -> None:
    for number, seconds in enumerate(block_s[1:], 1):
        pace.learn(number * BLOCK, (number + 1) * BLOCK, seconds)


def test_without_any_utterance_before_it_one_goes_on_as_it_began() -> None:
    assert TalkerPace(BLOCK).expected_s(BLOCK, 3 * BLOCK, 5 * BLOCK, elapsed_s=0.4) == pytest.approx(0.4)


def test_blocks_are_expected_to_take_what_they_took_at_their_place() -> None:
    pace = TalkerPace(BLOCK)
    utterance(pace, [0.2, 0.2, 0.2, 0.1, 0.05])
    assert pace.expected_s(BLOCK, 2 * BLOCK, 5 * BLOCK, elapsed_s=0.2) == pytest.approx(0.35)
    assert pace.expected_s(BLOCK, 2 * BLOCK, 5 * BLOCK - 6, elapsed_s=0.2) == pytest.approx(0.325), (
        "half a block less"
    )
    assert pace.expected_s(BLOCK, 2 * BLOCK + 6, 5 * BLOCK, elapsed_s=0.3) == pytest.approx(0.25), (
        "half of one is there"
    )
    assert pace.expected_s(BLOCK, 2 * BLOCK, 7 * BLOCK, elapsed_s=0.2) == pytest.approx(0.45), (
        "as the last one known"
    )


def test_an_utterance_that_is_slower_than_others_stays_so() -> None:
    pace = TalkerPace(BLOCK)
    utterance(pace, [0.2, 0.2, 0.1, 0.1])
    assert pace.expected_s(BLOCK, 2 * BLOCK, 4 * BLOCK, elapsed_s=0.4) == pytest.approx(0.4)


def test_the_pace_follows_the_utterances_of_late() -> None:
    pace = TalkerPace(BLOCK)
    for seconds in [0.25] * 3 + [0.1] * 30:
        utterance(pace, [0.0, seconds, seconds])
    assert pace.expected_s(BLOCK, 2 * BLOCK, 3 * BLOCK, elapsed_s=0.1) == pytest.approx(0.1, rel=0.02)


def test_an_utterance_that_was_kept_waiting_says_little_of_others() -> None:
    pace = TalkerPace(BLOCK)
    for _ in range(10):
        utterance(pace, [0.1] * 6)
    utterance(pace, [0.1, 0.1, 10.0, 0.1, 0.1, 0.1])
    assert 0.4 <= pace.expected_s(BLOCK, 2 * BLOCK, 6 * BLOCK, elapsed_s=0.1) < 0.5


def test_an_utterance_that_was_kept_waiting_is_not_expected_to_be_slow_for_ever() -> None:
    pace = TalkerPace(BLOCK)
    utterance(pace, [0.1] * 6)
    assert pace.expected_s(BLOCK, 2 * BLOCK, 6 * BLOCK, elapsed_s=10.0) == pytest.approx(1.6)


def test_codes_that_come_several_blocks_at_once_or_within_one() -> None:
    pace = TalkerPace(BLOCK)
    assert pace.learn(BLOCK, 3 * BLOCK, 0.4)
    assert not pace.learn(3 * BLOCK, 3 * BLOCK + 5, 7.0)
    assert pace.expected_s(BLOCK, 2 * BLOCK, 4 * BLOCK, elapsed_s=0.2) == pytest.approx(0.4)
    assert TalkerPace(BLOCK).expected_s(3, 5, BLOCK, elapsed_s=0.2) == pytest.approx(0.7), (
        "within the first block"
    )
