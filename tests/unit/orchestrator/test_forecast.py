"""Which windows code2wav is expected to have computed by when."""

from dataclasses import dataclass, field

import pytest

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.orchestrator.forecast import FIRST_DUE_S, NUM_AHEAD, Forecast
from omni_server.orchestrator.step_times import SAME_STEP_S, StepTimes
from omni_server.orchestrator.window_schedule import WindowSchedule
from tests.unit.orchestrator.simulated_speech import LAYOUT

PLAN = ChunkPlan(new_blocks=(1, 2, 4), past_blocks=0, future_blocks=1)
SCHEDULE = WindowSchedule(PLAN, LAYOUT, PLAN.new_blocks)
CODES = [SCHEDULE.computed_codes(number) for number in range(3)]
STARTS_S = [SCHEDULE.start_s(number) for number in range(4)]
NOW = 100.0
STEP_S, CODE_S = 0.02, 0.001


class Steps(StepTimes):
    """20 ms a step and 1 ms a code; the last one ended at `last_end`."""

    def __init__(self, last_end: float = NOW) -> None:
        super().__init__(lambda: NOW)
        self._last = last_end

    @property
    def last_end(self) -> float:
        return self._last

    def predict(self, num_codes: int) -> float:
        return STEP_S + CODE_S * num_codes if num_codes else 0.0


def step_s(*windows: int) -> float:
    """A step of the windows with these numbers."""
    return STEP_S + CODE_S * sum(CODES[number] for number in windows)


@dataclass(eq=False)
class Stream:
    """By default one whose first window has come back; its talker has made every code."""

    schedule: WindowSchedule | None = field(default_factory=lambda: SCHEDULE)
    started_at: float | None = None
    next_window: int = 1
    is_waiting: bool = False
    sent_at: float = NOW
    sent_due: float = NOW
    num_codes: int = 10_000
    codes_at: float = 0.0

    def has_window(self, number: int) -> bool:
        return SCHEDULE.first_code(number) < self.num_codes

    def expected_codes_at(self, needed: int) -> float:
        return self.codes_at


def until(number: int) -> int:
    """Codes of an utterance that has the windows before this one."""
    return SCHEDULE.first_code(number)


def late_s(
    own: Stream,
    *others: Stream,
    steps: StepTimes | None = None,
    max_step_codes: int = 1000,
    max_ahead_s: float | None = None,
    horizon: float = NOW + 10,
) -> float:
    forecast = Forecast(
        [*others, own],
        {own},
        steps or Steps(),
        now=NOW,
        max_step_codes=max_step_codes,
        max_ahead_s=max_ahead_s,
        horizon=horizon,
    )
    return forecast.late_s(own)


def test_a_window_is_as_early_as_what_comes_before_it_plays_for_longer_than_its_step_takes() -> None:
    assert late_s(Stream(num_codes=until(2))) == pytest.approx(step_s(1) - STARTS_S[1])


def test_the_latest_of_the_next_windows_counts() -> None:
    """Each goes to code2wav when the one before it has come back, with codes that are there then."""
    assert late_s(Stream(num_codes=until(3))) == pytest.approx(step_s(1) - STARTS_S[1])
    waits = Stream(num_codes=until(2), codes_at=NOW + 0.5)
    assert late_s(waits) == pytest.approx(0.5 + step_s(1) - STARTS_S[1])


def test_no_more_windows_are_looked_at_than_will_have_become_early_or_late_by_then() -> None:
    class Slowing(Stream):
        def expected_codes_at(self, needed: int) -> float:
            return NOW if needed <= SCHEDULE.needed_codes(NUM_AHEAD) else NOW + 9.0

    assert late_s(Slowing()) < 0


def test_one_without_further_windows_is_not_late() -> None:
    assert late_s(Stream(num_codes=until(1))) == float("-inf")


def test_one_without_windows_before_its_end_is_not_late_and_keeps_nobody_up() -> None:
    whole = Stream(schedule=None)
    assert late_s(whole, Stream()) == float("-inf")
    assert late_s(Stream(), whole) == late_s(Stream())


def test_all_that_fit_share_a_step() -> None:
    own, others = Stream(num_codes=until(2)), [Stream(num_codes=until(2)) for _ in range(3)]
    assert late_s(own, *others) == pytest.approx(step_s(1, 1, 1, 1) - STARTS_S[1])


def test_what_does_not_fit_waits_for_the_next_step_those_that_are_due_first_before_the_others() -> None:
    other = Stream(started_at=NOW - 0.1, num_codes=until(2))
    expected = 2 * step_s(1) - STARTS_S[1]
    assert late_s(Stream(num_codes=until(2)), other, max_step_codes=CODES[1]) == pytest.approx(expected)
    other.started_at = NOW + 0.1
    assert late_s(Stream(num_codes=until(2)), other, max_step_codes=CODES[1]) == late_s(
        Stream(num_codes=until(2))
    )


def test_a_window_larger_than_a_step_has_room_for_is_computed_alone() -> None:
    assert late_s(Stream(num_codes=until(2)), max_step_codes=1) == late_s(Stream(num_codes=until(2)))


def test_windows_whose_codes_come_before_its_own_go_into_earlier_steps() -> None:
    own = Stream(num_codes=until(2), codes_at=NOW + 0.02)
    other = Stream(started_at=NOW, num_codes=until(2))
    assert late_s(own, other) == pytest.approx(2 * step_s(1) - STARTS_S[1]), (
        "its codes come while a step runs"
    )
    own.codes_at = NOW + 1.0
    assert late_s(own, other) == pytest.approx(1.0 + step_s(1) - STARTS_S[1])


def test_a_window_in_the_running_step_comes_when_that_ends() -> None:
    own = Stream(is_waiting=True, sent_at=NOW - 0.05, num_codes=until(2))
    other = Stream(is_waiting=True, sent_at=NOW - 0.03, started_at=NOW, num_codes=until(2))
    ended = Steps(last_end=NOW - 0.01)  # both were there when the next one began
    assert late_s(own, other, steps=ended) == pytest.approx(step_s(1, 1) - 0.01 - STARTS_S[1])
    idle = Steps(last_end=NOW - 5.0)  # it began with the first
    assert late_s(own, other, steps=idle) == pytest.approx(step_s(1) - 0.05 - STARTS_S[1])
    assert late_s(other, own, steps=idle) == pytest.approx(2 * step_s(1) - 0.05 - STARTS_S[1])


def test_behind_a_step_a_window_that_comes_as_it_ends_is_not_in_the_next() -> None:
    """That has begun, without it, before the end of the step is known here."""
    other = Stream(is_waiting=True, sent_at=NOW - 0.03, started_at=NOW, num_codes=until(2))
    late = Stream(is_waiting=True, sent_at=NOW - SAME_STEP_S / 2, num_codes=until(2))
    assert late_s(late, other) == pytest.approx(2 * step_s(1) - STARTS_S[1])
    other.sent_at = NOW + SAME_STEP_S / 2
    assert late_s(late, other) == pytest.approx(step_s(1) - STARTS_S[1]), "it was the first to come"


def test_a_step_that_begins_with_a_window_waits_a_moment_for_others() -> None:
    own = Stream(is_waiting=True, sent_at=NOW, num_codes=until(2))
    other = Stream(is_waiting=True, sent_at=NOW - SAME_STEP_S / 2, started_at=NOW, num_codes=until(2))
    expected = step_s(1, 1) - SAME_STEP_S / 2 - STARTS_S[1]
    assert late_s(own, other, steps=Steps(last_end=NOW - 1.0)) == pytest.approx(expected)


def test_a_step_that_takes_longer_than_expected_may_end_at_any_moment() -> None:
    own = Stream(is_waiting=True, sent_at=NOW - 5.0, num_codes=until(2))
    assert late_s(own, steps=Steps(last_end=NOW - 5.0)) == pytest.approx(-STARTS_S[1])


def test_first_windows_are_due_a_second_after_they_are_sent() -> None:
    """They go behind those that are played before that, and before those that are played later."""
    first = Stream(next_window=0, num_codes=until(1))
    own = Stream(next_window=3, num_codes=until(4))
    alone_s = late_s(own, max_step_codes=1)
    assert STARTS_S[3] > FIRST_DUE_S
    assert late_s(own, first, max_step_codes=1) == pytest.approx(alone_s + step_s(0))
    own = Stream(next_window=1, num_codes=until(2))
    assert late_s(own, first, max_step_codes=1) == late_s(own, max_step_codes=1)


def test_one_whose_first_window_is_on_its_way_is_played_from_when_that_comes() -> None:
    """And needs the second soon after, before what others need later."""
    new = Stream(next_window=0, is_waiting=True, sent_at=NOW, sent_due=NOW + 1.0, num_codes=until(2))
    own = Stream(next_window=3, num_codes=until(4))
    expected = step_s(0) + step_s(1) + late_s(own)
    assert late_s(own, new, max_step_codes=1) == pytest.approx(expected)


def test_what_has_not_come_by_the_horizon_is_at_least_so_late() -> None:
    never = Stream(num_codes=until(2), codes_at=NOW + 1000.0)
    endless = Stream(started_at=NOW - 1.0, num_codes=10**12)  # so that time goes on step by step
    late = late_s(never, endless, horizon=NOW + 3.0)
    assert 3.0 <= late + STARTS_S[1] <= 3.0 + STEP_S + CODE_S * SCHEDULE.computed_codes(100)


def test_of_windows_in_code2wav_those_go_first_that_were_due_first_when_they_were_sent() -> None:
    own = Stream(is_waiting=True, sent_at=NOW - 0.03, sent_due=NOW + 2.0, num_codes=until(2))
    other = Stream(is_waiting=True, sent_at=NOW - 0.03, sent_due=NOW + 1.0, num_codes=until(2))
    first_s, second_s = step_s(1) - 0.03 - STARTS_S[1], 2 * step_s(1) - 0.03 - STARTS_S[1]
    ended = Steps(last_end=NOW - 1.0)
    assert late_s(own, other, steps=ended, max_step_codes=CODES[1]) == pytest.approx(second_s)
    own.sent_due = NOW + 0.5
    assert late_s(own, other, steps=ended, max_step_codes=CODES[1]) == pytest.approx(first_s)


def test_a_stream_that_is_too_far_ahead_of_its_listener_sends_nothing() -> None:
    own = Stream(num_codes=until(2), codes_at=NOW + 0.01)
    ahead = Stream(started_at=NOW - 1.0, next_window=3)  # of which nothing is needed before STARTS_S[3] - 1.0
    assert late_s(own, ahead) > late_s(own) + STEP_S, "its own codes come while a step of the other runs"
    assert late_s(own, ahead, max_ahead_s=STARTS_S[3] - 1.0 - 0.1) == pytest.approx(late_s(own))


def test_nothing_is_late_while_nothing_is_known_of_steps() -> None:
    others = [Stream(started_at=NOW) for _ in range(20)]
    assert late_s(Stream(), *others, steps=StepTimes(lambda: NOW)) == pytest.approx(-STARTS_S[1])


def test_it_comes_to_an_end_also_where_steps_take_no_time_and_a_talker_makes_all_codes_at_once() -> None:
    endless = Stream(started_at=NOW, num_codes=10**12)
    own = Stream(num_codes=until(2), codes_at=NOW + 0.5)
    assert late_s(own, endless, steps=StepTimes(lambda: NOW)) == pytest.approx(-STARTS_S[1])
