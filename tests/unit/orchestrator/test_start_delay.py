"""How long first audio is held back, from what happened to the streams before."""

from contextlib import ExitStack

import pytest

from omni_server.orchestrator.start_delay import HORIZON_S, NUM_RECENT, StartDelay

FIRST_S = 0.24
"""Length of a first piece."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def delay(clock: Clock) -> StartDelay:
    return StartDelay(1.0, clock)


def stream(delay: StartDelay, clock: Clock, *, gap_s: float) -> None:
    """A stream whose second and last piece comes `gap_s` after its first."""
    playback = delay.start(FIRST_S)
    clock.now += gap_s
    playback.extend(FIRST_S, 2 * FIRST_S, clock.now)
    playback.end()


def test_nothing_is_held_while_nothing_is_known(delay: StartDelay) -> None:
    assert delay.delay_s() == 0


def test_nothing_is_held_after_streams_that_were_in_time(delay: StartDelay, clock: Clock) -> None:
    for _ in range(5):
        stream(delay, clock, gap_s=0.2)
    assert delay.delay_s() == 0


def test_late_streams_hold_the_next_one_by_what_they_would_have_needed(delay: StartDelay, clock: Clock) -> None:
    for _ in range(3):
        stream(delay, clock, gap_s=0.54)
    assert delay.delay_s() == pytest.approx(0.3)


def test_the_worst_moment_of_a_stream_counts(delay: StartDelay, clock: Clock) -> None:
    for _ in range(2):
        playback = delay.start(FIRST_S)
        for number, late_s in enumerate([0.1, 0.4, 0.0], start=1):
            playback.extend(number * FIRST_S, (number + 1) * FIRST_S, clock.now + number * FIRST_S + late_s)
        playback.end()
    assert delay.delay_s() == pytest.approx(0.4)


def test_one_hiccup_moves_nothing(delay: StartDelay, clock: Clock) -> None:
    stream(delay, clock, gap_s=5.0)
    assert delay.delay_s() == 0
    stream(delay, clock, gap_s=0.1)
    assert delay.delay_s() == 0


def test_it_is_never_longer_than_allowed(delay: StartDelay, clock: Clock) -> None:
    for _ in range(4):
        stream(delay, clock, gap_s=3.0)
    assert delay.delay_s() == 1.0


def test_zero_turns_it_off(clock: Clock) -> None:
    delay = StartDelay(0.0, clock)
    for _ in range(4):
        stream(delay, clock, gap_s=3.0)
    assert delay.delay_s() == 0


def test_running_streams_whose_next_piece_is_overdue_count_before_it_comes(delay: StartDelay, clock: Clock) -> None:
    playbacks = [delay.start(FIRST_S) for _ in range(3)]
    clock.now += FIRST_S
    assert delay.delay_s() == 0
    clock.now += 0.15
    assert delay.delay_s() == pytest.approx(0.15)
    for playback in playbacks:
        playback.end()
    clock.now += 1.0
    assert delay.delay_s() == 0, "a stream that has ended, for whatever reason, waits for nothing"


def test_streams_in_time_push_the_late_ones_out(delay: StartDelay, clock: Clock) -> None:
    for _ in range(4):
        stream(delay, clock, gap_s=0.54)
    for _ in range(NUM_RECENT - 1):
        stream(delay, clock, gap_s=0.1)
    assert delay.delay_s() == 0


def test_a_quiet_time_is_forgiving(delay: StartDelay, clock: Clock) -> None:
    for _ in range(4):
        stream(delay, clock, gap_s=0.54)
    clock.now += HORIZON_S
    assert delay.delay_s() == 0


def test_what_happened_under_a_load_that_is_gone_does_not_count(delay: StartDelay, clock: Clock) -> None:
    """Seen with 64 callers, then one: its first audio waited for a second on an idle GPU."""
    with ExitStack() as crowd:
        for _ in range(16):
            crowd.enter_context(delay.stream())
        playbacks = [delay.start(FIRST_S) for _ in range(16)]
        clock.now += 1.0
        assert delay.delay_s() == pytest.approx(1.0 - FIRST_S)
        for playback in playbacks:
            playback.extend(FIRST_S, 2 * FIRST_S, clock.now)
            playback.end()
    with delay.stream():
        assert delay.delay_s() == 0
