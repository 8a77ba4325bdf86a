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


def test_steps_of_different_sizes_tell_what_a_step_and_what_a_code_takes(times: StepTimes, clock: Clock) -> None:
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


def test_more_than_a_step_holds_takes_several(times: StepTimes, clock: Clock) -> None:
    for windows in ([24], [100], [100], [24], [24]):
        step(times, clock, windows)
    assert times.largest_step == 100
    assert times.predict(300) == pytest.approx(3 * 0.03 + 0.06, rel=0.03)


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


def test_the_step_that_runs_at_any_moment_is_more_often_a_long_one(times: StepTimes, clock: Clock) -> None:
    for windows in ([50], [850], [50], [850], [24]):  # 40 and 200 ms; the last one is not over
        step(times, clock, windows)
    assert times.usual_step_s == pytest.approx((0.04**2 + 0.2**2) / 0.24, rel=0.02)


def test_among_others_a_window_waits_for_the_end_of_whole_steps(times: StepTimes, clock: Clock) -> None:
    for windows in ([50], [850], [50], [850], [24]):
        step(times, clock, windows)
    usual_s = times.usual_step_s
    assert times.predict_among_others(0, 50, 1.0) == pytest.approx(usual_s)
    assert times.predict_among_others(0, 50, 0.5) == pytest.approx(usual_s / 2)
    assert times.predict_among_others(20, 30, 0.0) == times.predict(50)
    assert times.predict_among_others(800, 50, 1.0) == times.predict(850)
    assert times.predict_among_others(801, 50, 1.0) == pytest.approx(2 * times.predict(850))
    assert times.predict_among_others(0, 900, 0.0) == times.predict(900), "one window is in one step"


def test_the_rest_of_a_step_counts_from_the_end_of_the_last_or_the_first_window_of_its_own(
    times: StepTimes, clock: Clock
) -> None:
    for _ in range(2):
        step(times, clock, [100])
    clock.now += 0.0198  # with the 0.2 ms that lie behind the step
    whole_s = times.predict(100)
    assert times.rest_of_step_s(100, 0.5, 0.5) == pytest.approx(whole_s - 0.02)
    assert times.rest_of_step_s(100, 0.01, 0.01) == pytest.approx(whole_s - 0.01)
    clock.now += 1.0
    assert times.rest_of_step_s(100, 0.5, 0.5) == 0.0


def test_a_window_that_may_not_be_in_the_running_step_has_no_rest_of_it(times: StepTimes, clock: Clock) -> None:
    for _ in range(2):
        step(times, clock, [100])
    clock.now += 0.0198
    assert times.rest_of_step_s(101, 0.5, 0.5) is None, "all may not fit"
    assert times.rest_of_step_s(100, 0.022, 0.5) is None, "it came as the last step ended"
    assert times.rest_of_step_s(100, 0.005, 0.01) is None, "it came behind the first"
    assert times.rest_of_step_s(100, 0.007, 0.01) is not None, "it came with the first"
