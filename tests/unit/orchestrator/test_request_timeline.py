"""When a request passed each stage."""

from omni_server.orchestrator.request_timeline import RequestTimeline
from omni_server.types import StageTimes, WindowTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_stage_is_absent_before_it_is_given_the_request() -> None:
    assert RequestTimeline().times() == {}


def test_times_count_from_the_start_and_know_first_and_last_output() -> None:
    clock = Clock()
    timeline = RequestTimeline(clock)
    for moment, (mark, stage) in enumerate(
        [
            (timeline.mark_submitted, "writer"),
            (timeline.mark_output, "writer"),
            (timeline.mark_submitted, "speaker"),
            (timeline.mark_output, "writer"),
            (timeline.mark_submitted, "writer"),
            (timeline.mark_output, "writer"),
        ]
    ):
        clock.now = 100.0 + moment
        mark(stage)
    times = timeline.times()
    assert times == {"writer": StageTimes(0.0, 1.0, 5.0), "speaker": StageTimes(2.0)}
    assert list(times) == ["writer", "speaker"]


def test_the_first_complete_window_submits_the_request_and_each_is_timed() -> None:
    clock = Clock()
    timeline = RequestTimeline(clock)
    clock.now = 101.5
    timeline.mark_window_ready("vocoder")
    timeline.mark_window_ready("vocoder")
    timeline.mark_window_sent("vocoder")
    clock.now = 103.0
    timeline.mark_window_computed("vocoder")
    timeline.mark_window_sent("vocoder")
    clock.now = 104.0
    timeline.mark_window_computed("vocoder")
    windows = (WindowTimes(1.5, 1.5, 3.0), WindowTimes(1.5, 3.0, 4.0))
    assert timeline.times() == {"vocoder": StageTimes(1.5, windows=windows)}
