"""Everything that requests take and must give back, counted from outside."""

from pathlib import Path

import httpx2

from tests.faults.supervised_server import SupervisedServer, samples
from tests.integration.server_process import wait_until

Census = dict[str, float]

_RELEASE_TIMEOUT_S = 30.0
_THREADS, _FILES, _TASKS = "threads of stage ", "file descriptors", "tasks of the event loop"
_MORE_THREADS = 4
"""By which an engine may have more than before: pools start some when they are first needed, and keep them.
Threads that requests left behind would be as many as the requests."""


def census(server: SupervisedServer, client: httpx2.Client) -> Census:
    """Of a server that does nothing: running requests, places of --max-queue, KV blocks, slots and blocks of
    the queue, tasks of the event loop, processes, file descriptors, threads and shared memory."""
    counted = server.baseline(client) | {_TASKS: samples(client)["omni_event_loop_tasks"]}
    for stage in server.engines:
        process = Path(f"/proc/{server.pid_of(stage)}")
        counted[f"{_FILES} of {stage}"] = len(list((process / "fd").iterdir()))
        counted[_THREADS + stage] = len(list((process / "task").iterdir()))
    return counted


def leaks(server: SupervisedServer, client: httpx2.Client, wanted: Census) -> dict[str, tuple[float, float]]:
    """What was and what is, where it is not the same again within half a minute."""

    def found() -> dict[str, tuple[float, float]]:
        now = census(server, client)
        return {
            name: (wanted[name], now[name]) for name in wanted if not _is_back(name, wanted[name], now[name])
        }

    try:
        wait_until(lambda: not found(), _RELEASE_TIMEOUT_S)
    except AssertionError:
        return found()
    return {}


def _is_back(name: str, before: float, now: float) -> bool:
    if name.startswith(_THREADS):
        return now <= before + _MORE_THREADS
    # Some files of the start are closed whenever the garbage collector comes to them. A task may have waited
    # for an engine to say that it is healthy.
    if name.startswith(_FILES) or name == _TASKS:
        return now <= before
    return now == before
