"""Ctrl-C and SIGTERM before the server is ready: it ends at once and in silence, with the usual exit code.

`test_server_killed` has SIGTERM while engines start."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.server_process import ROOT, wait_until

END_TIMEOUT_S = 60.0

When = Callable[[Path], bool]


def at_once(log: Path) -> bool:
    """Python still imports the command line."""
    return True


def while_it_imports(log: Path) -> bool:
    return "importing PyTorch and vLLM" in log.read_text()


def while_engines_start(log: Path) -> bool:
    return "thinker: starting" in log.read_text()


@pytest.mark.parametrize(
    ("when", "number"),
    [(at_once, signal.SIGTERM), (while_it_imports, signal.SIGINT), (while_engines_start, signal.SIGINT)],
)
def test_a_server_that_is_not_ready_ends_at_once_and_in_silence(
    when: When, number: signal.Signals, checkpoint: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log.txt"
    command = [sys.executable, "-m", "omni_server.cli.entry", "serve", str(checkpoint), "--port", "0"]
    with log.open("wb") as output:
        server = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_until(lambda: has_handler(server.pid, signal.SIGTERM), END_TIMEOUT_S, log.read_text)
        wait_until(lambda: when(log), END_TIMEOUT_S, log.read_text)
        os.killpg(server.pid, number)  # as a terminal and a service manager do
        assert server.wait(END_TIMEOUT_S) == 128 + number
        text = log.read_text()
        assert "Traceback" not in text
        assert "rror" not in text.replace("uvicorn.error", "")
        assert "leaked" not in text
        wait_until(lambda: not processes_of_group(server.pid), END_TIMEOUT_S)
    finally:
        server.kill()
        server.wait()


def has_handler(pid: int, number: int) -> bool:
    """Python itself never handles SIGTERM."""
    caught = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")
    )
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def processes_of_group(group: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == group and fields[0] != "Z":  # the session: engines have groups of their own
            found.append(int(folder.name))
    return found
