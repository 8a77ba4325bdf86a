"""A server's process that is forked from one which has imported vLLM, in place of a new interpreter's."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path

import setproctitle

from omni_server.cli import entry
from omni_server.config.load import load_stage_config
from omni_server.engine import fork_server
from omni_server.engine.environment import set_engine_environment
from stages.qwen2_5_omni import FAMILY
from stages.qwen2_5_omni.family import Qwen25OmniFamily

DEMO_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "qwen2_5_omni.demo-cpu.yaml"


class _TestFamily(Qwen25OmniFamily):
    """With the models of tests/faults."""

    engine_modules = (
        *FAMILY.engine_modules,
        "omni_server.api.server",
        "omni_server.omni",
        "omni_server.engine.supervisor",
        "omni_server.orchestrator.orchestrator",
        "tests.integration.quick_engines",
        "tests.faults.failing_models",
        "tests.faults.corrupting_models",
    )


def start_fork_server() -> None:
    """One for all engines and servers of this test run; harmless to call again."""
    set_engine_environment(load_stage_config(DEMO_CONFIG))
    fork_server.start(_TestFamily())


class ForkedServer:
    """What tests use of `subprocess.Popen`, for `omni-server` with these arguments."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        stdout: Path,
        stderr: Path,
    ) -> None:
        start_fork_server()
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(list(arguments), cwd, dict(environment), stdout, stderr), name="omni-server"
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            assert timeout_s is not None
            raise subprocess.TimeoutExpired("omni-server", timeout_s)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()


def _run(arguments: list[str], cwd: Path, environment: dict[str, str], stdout: Path, stderr: Path) -> None:
    setproctitle.getproctitle()  # what it needs of the environment is gone afterwards
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    tempfile.tempdir = None
    # As a new interpreter, it has a resource tracker of its own, which removes the semaphores of a server
    # that was killed, and the process that it forks engines from has not been prepared yet.
    vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)  # type: ignore[attr-defined]
    del sys.modules[fork_server._PREPARATION]
    sys.argv = ["omni-server", *arguments]
    entry.run()
