"""When a stage is started again, and when no more."""

import pytest

from omni_server.config.stage_config import SupervisionConfig
from omni_server.engine.restarts import CrashLoopError, Restarts


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_first_restart_comes_at_once_and_later_ones_after_growing_times() -> None:
    policy = SupervisionConfig(max_restarts=7, max_backoff_s=5.0)
    restarts = Restarts("talker", policy, Clock())
    assert [restarts.next_delay_s() for _ in range(7)] == [0.0, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert restarts.count == 7


def test_too_many_deaths_within_the_window_are_a_crash_loop() -> None:
    restarts = Restarts("talker", SupervisionConfig(max_restarts=2, restart_window_s=60), Clock())
    restarts.next_delay_s()
    restarts.next_delay_s()
    with pytest.raises(CrashLoopError, match="has died 3 times within 60 s"):
        restarts.next_delay_s()


def test_restarts_are_forgotten_after_the_window() -> None:
    clock = Clock()
    restarts = Restarts("talker", SupervisionConfig(max_restarts=1, restart_window_s=60), clock)
    for _ in range(3):
        assert restarts.next_delay_s() == 0.0
        clock.now += 61
    assert restarts.count == 3


def test_without_restarts_the_first_death_is_the_last() -> None:
    with pytest.raises(CrashLoopError, match="has died 1 times"):
        Restarts("talker", SupervisionConfig(max_restarts=0), Clock()).next_delay_s()
