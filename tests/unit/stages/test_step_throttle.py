"""Stages of low priority pause for urgent batches, and never for longer than they can afford."""

import itertools
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_server.protocol.give_way import BatchNotice, GiveWaySpec, encode_notice
from omni_server.protocol.local_socket import new_socket_name, socket_address
from stages.runtime import step_throttle
from stages.runtime.step_throttle import (
    GAP_S,
    MAX_AGE_S,
    MAX_INTERVAL_S,
    MAX_PAUSE_S,
    MAX_QUEUED,
    PAUSE_PER_SECOND,
    PAUSE_SAVINGS_S,
    BatchAnnouncer,
    PauseBudget,
    StepThrottle,
)

DEADLINE_S = 10.0


def test_a_stage_that_has_not_paused_for_long_has_all_its_savings() -> None:
    assert PauseBudget(100.0).left_s(100.0) == PAUSE_SAVINGS_S
    assert PauseBudget(100.0).left_s(5000.0) == PAUSE_SAVINGS_S


def test_a_pause_is_paid_for_and_earned_again_by_time_without_one() -> None:
    budget = PauseBudget(100.0)
    budget.paused(107.0, 107.04)
    assert budget.left_s(107.04) == pytest.approx(PAUSE_SAVINGS_S - 0.04)
    assert budget.left_s(107.06) == pytest.approx(PAUSE_SAVINGS_S - 0.04 + 0.02 * PAUSE_PER_SECOND)
    assert budget.left_s(110.0) == PAUSE_SAVINGS_S


def test_a_pause_that_lasted_too_long_is_made_up_for() -> None:
    budget = PauseBudget(0.0)
    budget.paused(1.0, 1.0 + PAUSE_SAVINGS_S + 0.01)
    ended = 1.0 + PAUSE_SAVINGS_S + 0.01
    assert budget.left_s(ended) == pytest.approx(-0.01)
    assert budget.left_s(ended + 0.01 / PAUSE_PER_SECOND) == pytest.approx(0.0)


@pytest.mark.parametrize("step_s", [0.007, 0.010, 0.015])
@pytest.mark.parametrize("batch_s", [0.035, 0.050, 0.090])
def test_when_urgent_batches_follow_one_another_steps_keep_two_thirds_of_the_time(
    step_s: float, batch_s: float
) -> None:
    """A simulated stage whose steps are ready one behind the other, beside batches that are all urgent: what
    the budget leaves it, also where no pause is cut short."""
    budget, now, pauses, steps = PauseBudget(0.0), 0.0, list[float](), list[float]()
    for batch in itertools.count(1):  # one pause for each
        left = budget.left_s(now)
        if left > 0:
            ended = now + min(left, batch * batch_s - now)
            budget.paused(now, ended)
            pauses.append(ended - now)
            now = ended
        while now < batch * batch_s:
            now += step_s
            steps.append(now)
        if now > 20.0:
            break
    settled = pauses[10:]
    assert max(settled) < 0.75 * PAUSE_SAVINGS_S
    assert sum(pauses) <= now / 3 + PAUSE_SAVINGS_S
    num_steps = sum(step > now / 2 for step in steps)
    assert now / 2 / num_steps == pytest.approx(1.5 * step_s, rel=0.03), (
        "a step and half of its time as pause"
    )


Listener = tuple[GiveWaySpec, StepThrottle]


def listener() -> Listener:
    spec = GiveWaySpec(new_socket_name())
    return spec, StepThrottle(spec)


@pytest.fixture
def low() -> Iterator[Listener]:
    spec, stage = listener()
    yield spec, stage
    stage.close()


@pytest.fixture
def other_low() -> Iterator[Listener]:
    spec, stage = listener()
    yield spec, stage
    stage.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that is never spent, so that what ends a pause is the end of the batch."""
    monkeypatch.setattr(step_throttle, "MAX_PAUSE_S", 10 * DEADLINE_S)
    monkeypatch.setattr(step_throttle, "PAUSE_SAVINGS_S", 10 * DEADLINE_S)


def send(spec: GiveWaySpec, *messages: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for message in messages:
            sender.sendto(message, socket_address(spec.socket))


def begun(age_s: float = 0.0) -> bytes:
    return encode_notice(
        BatchNotice(is_running=True, is_urgent=True, num_streams=1, sent_at=time.monotonic() - age_s)
    )


def ended() -> bytes:
    return encode_notice(
        BatchNotice(is_running=False, is_urgent=True, num_streams=1, sent_at=time.monotonic())
    )


def stepping(stage: StepThrottle) -> threading.Thread:
    """A thread that ends when the stage may make its step."""
    thread = threading.Thread(target=stage.wait, daemon=True)
    thread.start()
    return thread


def assert_steps(thread: threading.Thread) -> None:
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def assert_waits(thread: threading.Thread) -> None:
    thread.join(0.05)
    assert thread.is_alive()


def test_nothing_is_paused_for_where_nothing_is_announced(low: Listener) -> None:
    _, stage = low
    for _ in range(100):
        stage.wait()
    assert (stage.num_pauses, stage.paused_s) == (0, 0.0)


@pytest.mark.usefixtures("patient")
def test_a_step_waits_until_the_batch_has_ended(low: Listener) -> None:
    spec, stage = low
    with BatchAnnouncer((spec,)).announced(is_urgent=True, num_streams=1):
        step = stepping(stage)
        assert_waits(step)
    assert_steps(step)
    assert stage.num_pauses == 1
    assert stage.paused_s > 0


def test_a_batch_that_has_ended_before_the_step_holds_nothing_up(low: Listener) -> None:
    spec, stage = low
    with BatchAnnouncer((spec,)).announced(is_urgent=True, num_streams=1):
        pass
    stage.wait()
    assert stage.num_pauses == 0


@pytest.mark.usefixtures("patient")
def test_of_several_messages_the_last_one_counts(low: Listener) -> None:
    spec, stage = low
    batches = BatchAnnouncer((spec,))
    with batches.announced(is_urgent=True, num_streams=1):
        pass
    with batches.announced(is_urgent=True, num_streams=1):
        step = stepping(stage)
        assert_waits(step)
    assert_steps(step)
    send(spec, begun(), begun(), ended())
    stage.wait()
    send(spec, ended(), ended())
    stage.wait()
    assert stage.num_pauses == 1


@pytest.mark.usefixtures("patient")
def test_the_next_batch_is_given_way_to_as_well(low: Listener) -> None:
    spec, stage = low
    for number in range(1, 4):
        with BatchAnnouncer((spec,)).announced(is_urgent=True, num_streams=1):
            step = stepping(stage)
            assert_waits(step)
        assert_steps(step)
        assert stage.num_pauses == number


def test_a_batch_whose_end_is_never_told_costs_one_pause_of_the_longest_time(low: Listener) -> None:
    spec, stage = low
    send(spec, begun())
    assert_steps(stepping(stage))
    assert stage.num_pauses == 1
    assert stage.paused_s >= 0.9 * MAX_PAUSE_S
    for _ in range(10):
        stage.wait()
    assert stage.num_pauses == 1


def test_while_there_is_no_budget_there_are_no_pauses(low: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_throttle, "PAUSE_PER_SECOND", 0.0)
    monkeypatch.setattr(step_throttle, "PAUSE_SAVINGS_S", MAX_PAUSE_S)  # enough for one
    spec, stage = low
    for _ in range(5):
        send(spec, begun())
        assert_steps(stepping(stage))
    assert stage.num_pauses == 1


@pytest.mark.usefixtures("patient")
def test_a_code2wav_that_is_killed_in_the_middle_of_a_batch_is_not_waited_for_again(
    low: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, stage = low
    script = f"""
import time
from omni_server.protocol.give_way import GiveWaySpec
from stages.runtime.step_throttle import BatchAnnouncer
with BatchAnnouncer((GiveWaySpec({spec.socket!r}),)).announced(is_urgent=True, num_streams=1):
    print("computing", flush=True)
    time.sleep(600)
"""
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"computing\n"
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    monkeypatch.setattr(step_throttle, "MAX_PAUSE_S", MAX_PAUSE_S)
    for _ in range(3):
        assert_steps(stepping(stage))
    assert stage.num_pauses <= 1


def test_old_news_is_not_believed(low: Listener) -> None:
    spec, stage = low
    send(spec, begun(age_s=step_throttle.MAX_AGE_S + 0.1))
    stage.wait()
    assert stage.num_pauses == 0


@pytest.mark.usefixtures("patient")
def test_other_datagrams_neither_start_a_pause_nor_end_one(low: Listener) -> None:
    spec, stage = low
    strange = (b"", b"hello", b'{"is_running": "perhaps"}', b"x" * 4096)
    send(spec, *strange)
    stage.wait()
    assert stage.num_pauses == 0
    with BatchAnnouncer((spec,)).announced(is_urgent=True, num_streams=1):
        send(spec, *strange)
        step = stepping(stage)
        send(spec, *strange)
        assert_waits(step)
    assert_steps(step)


def test_a_batch_that_fails_ends_too(low: Listener) -> None:
    spec, stage = low
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        BatchAnnouncer((spec,)).announced(is_urgent=True, num_streams=1),
    ):
        raise RuntimeError("out of memory")
    stage.wait()
    assert stage.num_pauses == 0


@pytest.mark.usefixtures("patient")
def test_all_stages_of_low_priority_pause(low: Listener, other_low: Listener) -> None:
    stages = (low, other_low)
    with BatchAnnouncer(tuple(spec for spec, _ in stages)).announced(is_urgent=True, num_streams=1):
        steps = [stepping(stage) for _, stage in stages]
        for step in steps:
            assert_waits(step)
    for step in steps:
        assert_steps(step)
    assert [stage.num_pauses for _, stage in stages] == [1, 1]


@pytest.mark.usefixtures("patient")
def test_a_stage_that_is_gone_keeps_nobody_from_telling_the_others(
    low: Listener, other_low: Listener
) -> None:
    other_low[1].close()
    with BatchAnnouncer((other_low[0], GiveWaySpec("omni-server-nobody"), low[0])).announced(
        is_urgent=True, num_streams=1
    ):
        step = stepping(low[1])
        assert_waits(step)
    assert_steps(step)


def test_a_batch_is_computed_where_nobody_listens() -> None:
    assert BatchAnnouncer((GiveWaySpec("omni-server-nobody"),)).has_listeners
    assert not BatchAnnouncer(()).has_listeners
    for listeners in ((), (GiveWaySpec("omni-server-nobody"),)):
        computed = False
        with BatchAnnouncer(listeners).announced(is_urgent=True, num_streams=1):
            computed = True
        assert computed


@pytest.mark.usefixtures("patient")
def test_a_stage_without_work_is_no_obstacle_and_hears_again_when_it_has_some(low: Listener) -> None:
    spec, stage = low
    batches = BatchAnnouncer((spec,))
    for _ in range(1000):  # more than the socket holds
        with batches.announced(is_urgent=True, num_streams=1):
            pass
    stage.wait()
    assert stage.num_pauses == 0
    with batches.announced(is_urgent=True, num_streams=1):
        step = stepping(stage)
        assert_waits(step)
    assert_steps(step)


def computing(stage: GiveWaySpec, num_streams: int, *, is_running: bool = True, age_s: float = 0.0) -> None:
    """A batch begins, or has ended, with so many utterances under way."""
    sent_at = time.monotonic() - age_s
    notice = BatchNotice(is_running=is_running, is_urgent=True, num_streams=num_streams, sent_at=sent_at)
    send(stage, encode_notice(notice))


def steps_s(stage: StepThrottle, count: int) -> float:
    """How long so many steps have to wait in all."""
    began = time.monotonic()
    for _ in range(count):
        stage.wait()
    return time.monotonic() - began


@pytest.fixture
def paced() -> Iterator[Listener]:
    """A stage of low priority whose distances are small beside a pause."""
    spec = GiveWaySpec(new_socket_name(), step_interval_per_stream_s=0.001, max_streams=16)
    stage = StepThrottle(spec)
    yield spec, stage
    stage.close()


def test_while_code2wav_is_at_work_steps_keep_a_distance_for_each_utterance_under_way(
    paced: Listener,
) -> None:
    spec, stage = paced
    for num_streams in (9, 15):
        computing(spec, num_streams)
        stage.wait()
        assert steps_s(stage, 10) >= 9 * num_streams * 0.001
    assert stage.num_pauses == 0


def test_more_utterances_than_a_stage_works_for_do_not_slow_it_further_down(paced: Listener) -> None:
    spec, stage = paced
    computing(spec, 100_000)
    stage.wait()
    assert 9 * 0.016 <= steps_s(stage, 10) < 10.0


def test_no_distance_is_too_large_for_speech() -> None:
    spec = GiveWaySpec(new_socket_name(), step_interval_per_stream_s=1.0, max_streams=16)
    stage = StepThrottle(spec)
    computing(spec, 16)
    stage.wait()
    assert 9 * MAX_INTERVAL_S <= steps_s(stage, 10) < 10.0
    stage.close()


def test_a_batch_is_no_reason_any_more_soon_after_its_end(paced: Listener) -> None:
    spec, stage = paced
    computing(spec, 15)
    computing(spec, 15, is_running=False, age_s=2 * GAP_S)
    stage.wait()
    assert steps_s(stage, 100) < 1.5


def test_between_two_batches_steps_keep_their_distance_too(
    paced: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_throttle, "GAP_S", 5.0)
    spec, stage = paced
    computing(spec, 15)
    computing(spec, 15, is_running=False)
    stage.wait()
    assert steps_s(stage, 10) >= 9 * 0.015


def test_a_batch_whose_end_is_never_told_is_forgotten(paced: Listener) -> None:
    spec, stage = paced
    computing(spec, 15, age_s=2 * MAX_AGE_S)
    assert steps_s(stage, 100) < 1.5


def test_of_more_messages_than_a_socket_keeps_the_last_one_is_not_believed(paced: Listener) -> None:
    """The end of that batch may be among those that were lost."""
    spec, stage = paced
    for _ in range(MAX_QUEUED):
        computing(spec, 1)
    stage.wait()
    assert stage.num_pauses == 0
    computing(spec, 1)
    stage.wait()
    assert stage.num_pauses == 1


def test_a_small_distance_does_not_take_the_place_of_a_pause(paced: Listener) -> None:
    spec, stage = paced
    stage.wait()
    computing(spec, 4)
    stage.wait()
    assert stage.num_pauses == 1


def test_steps_at_a_wide_distance_do_not_pause_as_well(paced: Listener) -> None:
    spec, stage = paced
    time.sleep(0.05)
    computing(spec, 15)
    stage.wait()
    assert stage.num_pauses == 0
