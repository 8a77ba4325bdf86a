"""When a request passed which stage."""

from omni_server.orchestrator.stage_clock import StageClock
from omni_server.types import StageTimes, WindowTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_has_a_time_before_it_happened() -> None:
    assert StageClock().times() == StageTimes()


def test_times_count_from_the_start_and_know_first_and_last() -> None:
    clock = Clock()
    stages = StageClock(clock)
    for moment, note in enumerate(
        [
            stages.text,
            stages.talker,
            stages.text,
            stages.codes,
            stages.audio,
            stages.text,
            stages.codes,
            stages.audio,
        ],
        start=1,
    ):
        clock.now = 100.0 + moment
        note()
    assert stages.times() == StageTimes(
        first_text_s=1.0,
        last_text_s=6.0,
        talker_opened_s=2.0,
        first_codes_s=4.0,
        last_codes_s=7.0,
        first_audio_s=5.0,
        last_audio_s=8.0,
    )


def test_windows_are_counted_when_they_are_complete_and_timed_one_by_one() -> None:
    clock = Clock()
    stages = StageClock(clock)
    stages.windows(0)
    assert stages.times() == StageTimes()
    clock.now = 101.5
    stages.windows(2)
    stages.window_sent()
    clock.now = 103.0
    stages.windows(1)
    stages.window_computed()
    stages.window_sent()
    assert stages.times() == StageTimes(
        first_window_s=1.5, last_window_s=3.0, num_windows=3, windows=(WindowTimes(1.5, 1.5, 3.0),)
    )


def test_times_read_as_one_line_of_milliseconds() -> None:
    times = StageTimes(
        first_text_s=0.013, last_text_s=0.34, first_codes_s=0.171, last_codes_s=0.9, first_audio_s=0.2145,
        last_audio_s=0.934, first_window_s=0.172, last_window_s=0.9, num_windows=6,
    )  # fmt: skip
    assert str(times) == "text 13-340, codes 171-900, windows 172-900, audio 214-934 (6)"
    assert str(StageTimes(first_text_s=0.5, last_text_s=0.5)) == "text 500-500"
