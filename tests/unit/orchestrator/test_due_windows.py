"""How many codes code2wav has to compute before a window that is due at some time."""

from dataclasses import dataclass

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.orchestrator.due_windows import FIRST_DUE_S, DueWindows
from omni_server.orchestrator.window_schedule import WindowSchedule
from tests.unit.orchestrator.simulated_speech import LAYOUT

PLAN = ChunkPlan(new_blocks=(1, 2, 4), carry=True)
SCHEDULE = WindowSchedule(PLAN, LAYOUT, PLAN.new_blocks)
"""Windows begin after 0, 0.24, 0.72 and 1.68 s and take 24, 36, 60 and 60 codes, one block of the future included."""
LARGEST_STEP = 100


@dataclass(eq=False)
class Stream:
    """One of which everything is known."""

    started_at: float | None = None
    next_window: int = 1
    is_waiting: bool = False
    waiting_s: float = 0.0
    sent_due: float = 0.0
    num_codes: int = 10_000
    codes_at: float = 0.0
    schedule: WindowSchedule | None = SCHEDULE

    def has_window(self, first_code: int) -> bool:
        return first_code < self.num_codes

    def expected_codes_at(self, needed: int) -> float:
        return self.codes_at


def test_windows_of_a_stream_that_is_played_count_when_they_are_due_earlier() -> None:
    own = Stream()
    windows = DueWindows([own, Stream(started_at=10.0)], horizon=100.0)
    assert [windows.codes_before(due, own, LARGEST_STEP) for due in (10.2, 10.25, 10.8, 12.0)] == [0, 36, 96, 156]


def test_no_window_counts_behind_the_end_of_an_utterance() -> None:
    own = Stream()
    windows = DueWindows([own, Stream(started_at=10.0, num_codes=37)], horizon=100.0)
    assert windows.codes_before(50.0, own, LARGEST_STEP) == 96


def test_a_stream_that_has_not_started_counts_with_what_is_in_code2wav() -> None:
    own = Stream(is_waiting=True)
    windows = DueWindows([own, Stream(), Stream(is_waiting=True)], horizon=100.0)
    assert windows.codes_before(0.0, own, LARGEST_STEP) == 36
    assert windows.codes_inside(own) == 36


def test_windows_in_code2wav_that_are_due_later_fill_up_one_step() -> None:
    own = Stream()
    others = [Stream(started_at=10.0, is_waiting=True) for _ in range(4)]
    windows = DueWindows([own, *others], horizon=100.0)
    assert windows.codes_before(10.0, own, LARGEST_STEP) == LARGEST_STEP
    assert windows.codes_before(10.0, own, 1000) == 4 * 36
    assert windows.codes_before(10.25, own, LARGEST_STEP) == 4 * 36, "all are due before it, and none is left"


def test_one_that_has_started_meanwhile_counts_from_then_on() -> None:
    own, other = Stream(), Stream(is_waiting=True)
    windows = DueWindows([own, other], horizon=100.0)
    assert windows.codes_before(10.5, own, LARGEST_STEP) == 36
    other.started_at = 10.0
    windows.add_played(other)
    assert windows.codes_before(10.5, own, LARGEST_STEP) == 36
    assert windows.codes_before(10.75, own, LARGEST_STEP) == 96
    assert windows.codes_inside(own) == 36


def test_windows_whose_codes_come_late_are_told_apart() -> None:
    own = Stream(started_at=10.0)
    windows = DueWindows([own, Stream(started_at=10.0), Stream(started_at=10.0, codes_at=9.5)], horizon=100.0)
    assert [windows.codes_coming_before(10.25, at, own, within_s=0.2) for at in (9.2, 9.4, 9.6, 9.8)] == [0, 36, 36, 0]
    assert windows.codes_coming_before(10.2, 9.5, own, within_s=0.2) == 0, "due later"


def test_the_next_window_of_a_stream_that_has_not_started_comes_before_those_that_get_their_codes_soon_after() -> None:
    own = Stream(codes_at=9.6)
    held, other = Stream(codes_at=9.5), Stream(codes_at=9.55)
    windows = DueWindows([own, held, other, Stream(is_waiting=True, codes_at=9.5)], horizon=100.0)
    # Due 0.24 s after they have their codes, when their streams may start.
    assert [windows.codes_coming_before(9.78, at, own, within_s=0.2) for at in (9.4, 9.5, 9.6, 9.8)] == [0, 36, 36, 0]
    assert windows.codes_coming_before(9.8, 9.6, own, within_s=0.2) == 36 + 36, "its own does not count"
    assert windows.codes_coming_before(9.8, 9.6, held, within_s=0.2) == 36
    held.started_at = 9.5
    windows.add_played(held)
    assert windows.codes_coming_before(9.78, 9.6, own, within_s=0.2) == 36, "once, as one that is played"


def test_a_first_window_comes_before_those_that_are_due_a_second_after_it_has_its_codes() -> None:
    own, new = Stream(codes_at=9.6), Stream(next_window=0, codes_at=9.5)
    windows = DueWindows([own, new], horizon=100.0)
    due = 9.5 + FIRST_DUE_S
    assert [windows.codes_coming_before(at, 9.6, own, within_s=0.2) for at in (due - 0.01, due)] == [0, 24]


def test_a_window_of_a_stream_that_has_not_started_counts_if_it_was_due_earlier_when_it_was_sent() -> None:
    own = Stream(is_waiting=True, sent_due=10.5)
    others = [Stream(is_waiting=True, sent_due=due) for due in (10.0, 11.0, 11.0, 11.0)]
    windows = DueWindows([own, *others], horizon=100.0)
    assert [windows.codes_before(due, own, 1000) for due in (9.9, 10.2, 10.7, 11.0)] == [4 * 36] * 4, (
        "they fill up a step"
    )
    assert [windows.codes_before(due, own, 36) for due in (9.9, 10.2, 10.7, 11.0)] == [36, 72, 72, 144]
    first = others[0]
    first.started_at = 9.9
    windows.add_played(first)  # its next window begins 0.24 s after the start
    assert [windows.codes_before(due, own, 36) for due in (10.1, 10.2)] == [36, 72]


def test_windows_behind_the_horizon_are_left_out() -> None:
    own = Stream()
    windows = DueWindows([own, Stream(started_at=10.0)], horizon=10.8)
    assert windows.codes_before(10.8, own, LARGEST_STEP) == windows.codes_before(99.0, own, LARGEST_STEP) == 96


def test_streams_without_windows_before_their_end_count_nothing() -> None:
    own = Stream()
    windows = DueWindows([own, Stream(started_at=1.0, is_waiting=True, schedule=None)], horizon=100.0)
    assert windows.codes_before(50.0, own, LARGEST_STEP) == windows.codes_inside(own) == 0


def test_the_longest_wait_is_that_of_the_window_that_came_first() -> None:
    streams = [Stream(), Stream(is_waiting=True, waiting_s=0.2), Stream(is_waiting=True, waiting_s=0.1)]
    assert DueWindows(streams, horizon=100.0).longest_wait_s == 0.2
    assert DueWindows([], horizon=100.0).longest_wait_s == 0.0
