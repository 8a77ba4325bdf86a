"""Notices that one engine has died or hangs."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from omni_server.engine.engine_processes import EngineProcesses
from omni_server.engine.stage_client import StageClient

POLL_S = 0.05
"""Between two looks at whether the engine has died, which cost next to nothing."""
HEALTH_INTERVAL_S = 2.0
"""Between two calls that the engine has to answer."""
_LONGEST_TICK_S = 1.0
"""Of the time between two looks no more counts as the engine's silence: this process itself may have been stopped."""


async def until_down(
    client: StageClient[Any],
    processes: EngineProcesses,
    hang_timeout_s: float | None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Returns when the engine has died, has failed, or has not answered for `hang_timeout_s`: in words, which.

    The call that it has to answer goes through the main loop of its engine core, between two steps, and to all of its
    workers. So a step that never ends is noticed as much as a process that is stopped.
    """
    health: asyncio.Task[None] | None = None
    silent_s = 0.0
    rested_s = 0.0
    last = clock()
    try:
        while True:
            if processes.has_ended or client.is_dead:
                return processes.why_ended()
            now = clock()
            tick_s, last = min(now - last, _LONGEST_TICK_S), now
            if health is None:
                rested_s += tick_s
                if hang_timeout_s is not None and rested_s >= HEALTH_INTERVAL_S:
                    health, silent_s = asyncio.create_task(client.check_health()), 0.0
            elif health.done():
                if (error := health.exception()) is not None and not client.is_dead:
                    return f"its health check has failed: {error}"
                health, rested_s = None, 0.0
            else:
                silent_s += tick_s
                if hang_timeout_s is not None and silent_s >= hang_timeout_s:
                    return f"its engine has not answered for {hang_timeout_s:g} s"
            await asyncio.sleep(POLL_S)
    finally:
        if health is not None:
            health.cancel()
            await asyncio.wait([health])
            if not health.cancelled():
                health.exception()  # asyncio would complain that nobody asked for it
