"""When an engine's process ends: where its server means it, and never before."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from omni_server.protocol.parent_watch import end_with_parent, ending_marker

TIMEOUT_S = 60.0


def live(watches: Event, has_been_told: Event) -> None:
    end_with_parent()
    watches.set()
    has_been_told.wait(TIMEOUT_S)  # Python calls handlers of signals between its own steps
    has_been_told.clear()
    time.sleep(TIMEOUT_S)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BaseProcess, Event]]:
    """A process that lives as an engine does, and what lets it take notice of signals that it got before."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    spawning = multiprocessing.get_context("spawn")
    watches, has_been_told = spawning.Event(), spawning.Event()
    process = spawning.Process(target=live, args=(watches, has_been_told))
    process.start()
    try:
        assert watches.wait(TIMEOUT_S)
        yield process, has_been_told
    finally:
        process.kill()
        process.join()


def test_sigterm_counts_only_when_the_server_has_said_that_it_ends(
    engine: tuple[BaseProcess, Event], tmp_path: Path
) -> None:
    process, has_been_told = engine
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    has_been_told.set()
    while has_been_told.is_set():  # it runs on
        assert process.is_alive()
        time.sleep(0.01)
    ending_marker(tmp_path).touch()
    os.kill(process.pid, signal.SIGTERM)
    process.join(TIMEOUT_S)
    assert process.exitcode == -signal.SIGTERM
