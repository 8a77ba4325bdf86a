"""What the windows that come back tell about the steps of code2wav."""

import pytest

from omni_server.orchestrator.step_times import StepTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def times(clock: Clock) -> StepTimes:
    return StepTimes(clock)


def step(times: StepTimes, clock: Clock, windows: list[int], *, wait_s: float = 0.0) -> None:
    """One step of 30 ms and 0.2 ms a code, begun when the last has ended, of windows sent `wait_s` before."""
    sent_at = clock.now - wait_s
    clock.now += 0.03 + 0.0002 * sum(windows)
    for codes in windows:
        times.came_back(codes, sent_at)
        clock.now += 0.0002  # they do not come back in the same microsecond


def test_nothing_is_predicted_while_nothing_is_known(times: StepTimes, clock: Clock) -> None:
    assert times.predict(1000) == 0
    step(times, clock, [24])
    assert times.predict(1000) == 0, "whether more windows of the same step follow is not known yet"


def test_steps_of_different_sizes_tell_what_a_step_and_what_a_code_takes(
    times: StepTimes, clock: Clock
) -> None:
    for windows in ([24], [60, 36], [24, 24, 24], [132], [36]):
        step(times, clock, windows)
    assert times.predict(120) == pytest.approx(0.03 + 0.024, rel=0.03)


def test_time_in_the_queue_is_no_time_in_a_step(times: StepTimes, clock: Clock) -> None:
    for windows in ([24], [60, 36], [24, 24, 24], [132], [36]):
        step(times, clock, windows, wait_s=5.0)
    assert times.predict(120) == pytest.approx(0.03 + 0.024, rel=0.03)


def test_idle_time_is_no_time_in_a_step(times: StepTimes, clock: Clock) -> None:
    for windows in ([24], [60, 36], [24, 24, 24], [132], [36]):
        clock.now += 3.0
        step(times, clock, windows)
    assert times.predict(120) == pytest.approx(0.03 + 0.024, rel=0.03)


def test_a_step_of_nothing_takes_no_time(times: StepTimes, clock: Clock) -> None:
    for windows in ([24], [132], [36]):
        step(times, clock, windows)
    assert times.predict(0) == 0


def test_steps_that_are_all_alike_say_nothing_of_larger_ones(times: StepTimes, clock: Clock) -> None:
    for _ in range(4):
        clock.now += 1.0
        step(times, clock, [24])
    assert times.predict(24) == times.predict(12) == pytest.approx(0.0348)


def test_what_was_long_ago_is_forgotten(times: StepTimes, clock: Clock) -> None:
    for _ in range(20):
        for codes in (24, 48):
            clock.now += 1.0
            times.came_back(codes, clock.now - 10 * codes)
    for _ in range(20):
        step(times, clock, [24])
        step(times, clock, [240])
    assert times.predict(120) == pytest.approx(0.03 + 0.024, rel=0.03)


def test_a_step_ends_with_the_first_window_that_comes_back(times: StepTimes, clock: Clock) -> None:
    step(times, clock, [24])
    ended = clock.now + 0.03 + 0.0002 * 48
    step(times, clock, [24, 24])
    assert times.last_end == pytest.approx(ended)
