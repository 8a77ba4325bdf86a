"""Ending an engine's processes, on children that are no engines."""

import contextlib
import gc
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from omni_server.engine.engine_processes import EngineProcesses
from tests.unit.engine import fake_children

Start = Callable[..., tuple[BaseProcess, Any]]
TIMEOUT_S = 30.0


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a child and waits for what it tells."""
    context = multiprocessing.get_context("spawn")
    children: list[BaseProcess] = []

    def start_child(run: Callable[..., None], *args: Any) -> tuple[BaseProcess, Any]:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=run, args=(sender, *args))
        child.start()
        children.append(child)
        assert receiver.poll(TIMEOUT_S)
        return child, receiver.recv()

    yield start_child
    for child in children:
        with contextlib.suppress(ValueError):  # closed by the test
            child.kill()
            child.join(TIMEOUT_S)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("first", [signal.SIGCONT, signal.SIGSTOP, signal.SIGKILL])
def test_core_and_its_workers_end_also_when_stopped_or_half_dead(start: Start, first: signal.Signals) -> None:
    core, worker = start(fake_children.sleep_with_a_worker)
    processes = EngineProcesses(core)
    assert core.pid is not None
    os.kill(core.pid, first)
    processes.kill()
    assert processes.wait(TIMEOUT_S)
    assert processes.has_ended
    assert not is_running(core.pid)
    assert not is_running(worker)
    processes.kill()  # harmless


def test_a_core_ends_also_where_no_file_can_be_opened(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    core, _ = start(fake_children.sleep_with_a_worker)
    processes = EngineProcesses(core)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        processes.kill()
        EngineProcesses(core).kill()  # harmless
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "it is not known what process" in caplog.text
    core.join(TIMEOUT_S)
    assert processes.has_ended
    processes.kill()  # the worker
    assert processes.wait(TIMEOUT_S)


def test_closing_gives_the_file_descriptors_back(start: Start) -> None:
    gc.collect()  # what other tests have left
    before = len(list(Path("/proc/self/fd").iterdir()))
    core, _ = start(fake_children.sleep_with_a_worker)
    processes = EngineProcesses(core)
    processes.kill()
    assert processes.wait(TIMEOUT_S)
    gc.collect()  # the pipe by which the child told of its worker
    assert len(list(Path("/proc/self/fd").iterdir())) > before
    processes.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_why_a_core_has_ended_is_told(start: Start) -> None:
    core, _ = start(fake_children.sleep_with_a_worker)
    processes = EngineProcesses(core)
    assert processes.why_ended() == "its engine has failed"  # it says so itself, and still runs
    processes.kill()
    assert processes.wait(TIMEOUT_S)
    assert processes.why_ended() == "its engine process was killed (SIGKILL)"
    core, _ = start(fake_children.end, 3)
    processes = EngineProcesses(core)
    assert processes.wait(TIMEOUT_S)
    assert processes.why_ended() == "its engine process has ended (exit code 3)"


def test_semaphores_of_a_killed_core_are_removed(start: Start) -> None:
    core, name = start(fake_children.hold_a_semaphore)
    own = multiprocessing.get_context("spawn").Lock()
    file = Path("/dev/shm") / f"sem.{name.removeprefix('/')}"
    assert file.exists()
    processes = EngineProcesses(core)
    processes.kill()
    assert processes.wait(TIMEOUT_S)
    assert file.exists(), "nobody else removes it before this process ends"
    processes.remove_leftovers()
    assert not file.exists()
    processes.remove_leftovers()  # harmless
    with own:  # what this process has is not touched
        assert (Path("/dev/shm") / f"sem.{vars(own)['_semlock'].name.removeprefix('/')}").exists()


def test_what_a_core_has_made_and_started_since_it_was_looked_at_ends_with_it(start: Start) -> None:
    orders, childs = multiprocessing.get_context("spawn").Pipe()
    core, _ = start(fake_children.make_more_when_told, childs)
    processes = EngineProcesses(core)
    orders.send(None)
    assert orders.poll(TIMEOUT_S)
    name, worker = orders.recv()
    file = Path("/dev/shm") / f"sem.{name.removeprefix('/')}"
    assert file.exists()
    processes.kill()
    assert processes.wait(TIMEOUT_S)
    processes.remove_leftovers()
    assert not is_running(worker)
    assert not file.exists()
