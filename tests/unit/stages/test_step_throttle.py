"""While a decoder announces batches, steps of a language model begin at an interval, and never wait long."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from omni_server.protocol.local_socket import new_socket_name, socket_address
from omni_server.protocol.runtime_config import StepThrottleSpec
from stages.runtime import step_throttle
from stages.runtime.step_throttle import (
    GAP_S,
    MAX_AGE_S,
    MAX_INTERVAL_S,
    BatchAnnouncer,
    BatchNotice,
    StepThrottle,
)

DEADLINE_S = 10.0
MAX_STREAMS = 16

Listener = tuple[StepThrottleSpec, StepThrottle]


def listener(interval_per_stream_s: float = 0.001) -> Listener:
    spec = StepThrottleSpec(new_socket_name(), interval_per_stream_s, MAX_STREAMS)
    return spec, StepThrottle(spec)


@pytest.fixture
def throttled() -> Iterator[Listener]:
    spec, stage = listener()
    yield spec, stage
    stage.close()


@pytest.fixture
def other() -> Iterator[Listener]:
    spec, stage = listener()
    yield spec, stage
    stage.close()


def send(spec: StepThrottleSpec, *messages: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for message in messages:
            sender.sendto(message, socket_address(spec.socket))


def notify(spec: StepThrottleSpec, num_streams: int, *, is_running: bool = True, age_s: float = 0.0) -> None:
    """A batch begins, or has ended, with so many active streams."""
    sent_at = time.monotonic() - age_s
    notice = BatchNotice(is_running=is_running, num_streams=num_streams, sent_at=sent_at)
    send(spec, msgspec.json.encode(notice))


def steps_s(stage: StepThrottle, count: int) -> float:
    """How long so many steps have to wait in all."""
    began = time.monotonic()
    for _ in range(count):
        stage.wait()
    return time.monotonic() - began


def assert_throttled(stage: StepThrottle, num_streams: int) -> None:
    stage.wait()
    assert steps_s(stage, 10) >= 9 * num_streams * 0.001


def assert_free(stage: StepThrottle) -> None:
    """100 steps among 15 streams would take 1.5 s."""
    stage.wait()
    assert steps_s(stage, 100) < 1.0


def test_steps_are_free_where_nothing_is_announced(throttled: Listener) -> None:
    assert_free(throttled[1])


def test_while_the_decoder_is_busy_steps_keep_an_interval_per_active_stream(throttled: Listener) -> None:
    spec, stage = throttled
    for num_streams in (9, 15):
        notify(spec, num_streams)
        assert_throttled(stage, num_streams)


def test_more_streams_than_a_stage_works_for_make_the_interval_no_longer(throttled: Listener) -> None:
    spec, stage = throttled
    notify(spec, 100_000)
    stage.wait()
    assert 9 * MAX_STREAMS * 0.001 <= steps_s(stage, 10) < DEADLINE_S


def test_no_interval_is_too_long_for_speech() -> None:
    spec, stage = listener(interval_per_stream_s=1.0)
    notify(spec, MAX_STREAMS)
    stage.wait()
    assert 9 * MAX_INTERVAL_S <= steps_s(stage, 10) < DEADLINE_S
    stage.close()


def test_of_several_notices_the_last_one_counts(throttled: Listener) -> None:
    spec, stage = throttled
    notify(spec, 1)
    notify(spec, 15, is_running=False)
    notify(spec, 15)
    assert_throttled(stage, 15)


def test_between_two_batches_steps_keep_their_interval(
    throttled: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_throttle, "GAP_S", 5.0)
    spec, stage = throttled
    with BatchAnnouncer((spec.socket,)).announced(15):
        pass
    assert_throttled(stage, 15)


def test_soon_after_a_batch_steps_are_free(throttled: Listener) -> None:
    spec, stage = throttled
    notify(spec, 15)
    notify(spec, 15, is_running=False, age_s=2 * GAP_S)
    assert_free(stage)


def test_a_batch_that_fails_ends_too(throttled: Listener) -> None:
    spec, stage = throttled
    with pytest.raises(RuntimeError, match="out of memory"), BatchAnnouncer((spec.socket,)).announced(15):
        raise RuntimeError("out of memory")
    time.sleep(GAP_S)
    assert_free(stage)


def test_a_batch_whose_end_is_never_told_is_forgotten(throttled: Listener) -> None:
    spec, stage = throttled
    notify(spec, 15, age_s=2 * MAX_AGE_S)
    assert_free(stage)


def test_a_decoder_that_is_killed_in_the_middle_of_a_batch_is_forgotten(throttled: Listener) -> None:
    spec, stage = throttled
    script = f"""
import time
from stages.runtime.step_throttle import BatchAnnouncer
with BatchAnnouncer(({spec.socket!r},)).announced(15):
    print("computing", flush=True)
    time.sleep(600)
"""
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"computing\n"
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    time.sleep(MAX_AGE_S)
    assert_free(stage)


def test_other_datagrams_change_nothing(throttled: Listener) -> None:
    spec, stage = throttled
    strange = (b"", b"hello", b'{"is_running": "perhaps"}', b"x" * 4096)
    send(spec, *strange)
    assert_free(stage)
    notify(spec, 15)
    send(spec, *strange)
    assert_throttled(stage, 15)


def test_all_stages_that_listen_are_throttled(throttled: Listener, other: Listener) -> None:
    with BatchAnnouncer((throttled[0].socket, other[0].socket)).announced(15):
        for _, stage in (throttled, other):
            assert_throttled(stage, 15)


def test_a_stage_that_is_gone_keeps_nobody_from_telling_the_others(
    throttled: Listener, other: Listener
) -> None:
    other[1].close()
    with BatchAnnouncer((other[0].socket, "omni-server-nobody", throttled[0].socket)).announced(15):
        assert_throttled(throttled[1], 15)


def test_a_batch_is_computed_where_nobody_listens() -> None:
    for sockets in ((), ("omni-server-nobody",)):
        computed = False
        with BatchAnnouncer(sockets).announced(15):
            computed = True
        assert computed


def test_a_stage_without_work_is_no_obstacle_and_hears_again_when_it_has_some(throttled: Listener) -> None:
    spec, stage = throttled
    batches = BatchAnnouncer((spec.socket,))
    for _ in range(1000):  # more than the socket holds
        with batches.announced(1):
            pass
    stage.wait()
    with batches.announced(15):
        assert_throttled(stage, 15)
