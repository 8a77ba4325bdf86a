"""kill -9 of the process that engines are forked from: nobody knows any more how they end, so all are
replaced."""

import os
import signal
from pathlib import Path

from tests.faults.supervised_server import RECOVERY_TIMEOUT_S, STAGES, SupervisedServer, samples
from tests.integration.server_process import command_line, is_running, parent_of, wait_until
from tests.integration.test_server import answer_to, outcome, spoken


def test_server_goes_on_with_new_engines_when_the_fork_server_is_killed(
    checkpoint: Path, tmp_path: Path
) -> None:
    server = SupervisedServer(checkpoint, tmp_path / "log.txt", is_forked=False)
    try:
        with server.client() as client:
            before = outcome(answer_to(client, spoken()))
            engines = server.engine_pids()
            (fork_server,) = {parent_of(pid) for pid in engines}
            assert fork_server != server.process.pid
            assert "forkserver" not in command_line(
                fork_server
            )  # a copy of the server, which has imported everything
            os.kill(fork_server, signal.SIGKILL)
            wait_until(lambda: not any(map(is_running, engines)), RECOVERY_TIMEOUT_S, lambda: server.log)
            server.wait_until_up(client)
            assert outcome(answer_to(client, spoken())) == before
            assert [samples(client)[f"omni_stage_restarts_total {stage}"] for stage in STAGES] == [1, 1, 1]
            engines = server.engine_pids()
            (new_fork_server,) = {parent_of(pid) for pid in engines}
            assert "forkserver" in command_line(new_fork_server)
        assert server.terminate() == 0
        wait_until(lambda: not any(map(is_running, [*engines, new_fork_server])), RECOVERY_TIMEOUT_S)
        server.wait_until_nothing_is_left()
    finally:
        server.process.kill()
        server.process.wait()
