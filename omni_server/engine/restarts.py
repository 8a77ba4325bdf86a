"""When a stage is started again, and when no more."""

import time
from collections import deque
from collections.abc import Callable

from omni_server.config.stage_config import SupervisionConfig

FIRST_BACKOFF_S = 0.5
"""Before the second restart; the first comes at once."""


class CrashLoopError(Exception):
    """A stage has died too often; the message says how often."""


class Restarts:
    """Of one stage."""

    def __init__(self, stage: str, policy: SupervisionConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._stage = stage
        self._policy = policy
        self._clock = clock
        self._recent: deque[float] = deque()
        self.count = 0
        """Restarts that were begun, successful or not."""

    def next_delay_s(self) -> float:
        """The stage is to be restarted: seconds to wait before. Raises `CrashLoopError` where it may not be."""
        policy, now = self._policy, self._clock()
        while self._recent and now - self._recent[0] > policy.restart_window_s:
            self._recent.popleft()
        if len(self._recent) >= policy.max_restarts:
            raise CrashLoopError(
                f"stage '{self._stage}' has died {len(self._recent) + 1} times within {policy.restart_window_s:g} s, "
                f"and supervision.max_restarts is {policy.max_restarts}"
            )
        self._recent.append(now)
        self.count += 1
        before = len(self._recent) - 1
        return 0.0 if before == 0 else min(policy.max_backoff_s, FIRST_BACKOFF_S * 2 ** (before - 1))
