"""Where engines are forked from, and that nothing of it outlives the server."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.server_process import is_running, wait_until

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files; pytest's own paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as path:
        yield Path(path)


@contextmanager
def program(mode: str, folder: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.unit.engine.forking_program", mode, str(folder / "report")]
    environment = os.environ | {"TMPDIR": str(folder), "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()


def report_in(folder: Path) -> dict[str, Any]:
    wait_until((folder / "report").exists, TIMEOUT_S)
    content: dict[str, Any] = json.loads((folder / "report").read_text())
    return content


def wait_until_nothing_is_left(report: dict[str, Any], folder: Path) -> None:
    wait_until(lambda: not is_running(report["fork_server"]) and not is_running(report["pid"]), TIMEOUT_S)
    assert not list(folder.glob("omni-engines-*"))


def test_a_program_with_threads_forks_engines_from_a_new_interpreter(folder: Path) -> None:
    with program("with threads", folder) as process:
        report = report_in(folder)
        assert not report["has_state_of_the_program"]
        assert report["has_module"]
        assert report["threads_of_fork_server"] == 1
        process.communicate("", TIMEOUT_S)
        assert process.returncode == 0
    wait_until_nothing_is_left(report, folder)


def test_a_program_that_ends_without_closing_its_engines_takes_them_with_it(folder: Path) -> None:
    with program("unclosed", folder) as process:
        assert process.wait(TIMEOUT_S) == 0
        report = report_in(folder)
    wait_until_nothing_is_left(report, folder)


def test_a_program_that_has_imported_for_its_engines_ends_without_a_word() -> None:
    """Triton is the module of theirs that looks for leaks."""
    program = (
        "from types import SimpleNamespace\n"
        "from omni_server.engine import fork_server\n"
        "vars(fork_server)['_MODULES'] = ()\n"
        "fork_server.import_engine_modules(SimpleNamespace(engine_modules=('triton',)))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert finished.stdout + finished.stderr == ""
