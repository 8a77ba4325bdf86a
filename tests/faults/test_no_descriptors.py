"""An engine dies while the server has no file descriptor left."""

import resource
import signal

import httpx2

from tests.faults.conftest import Before
from tests.faults.supervised_server import ANSWER_TIMEOUT_S, SupervisedServer
from tests.integration.server_process import wait_until
from tests.integration.test_server import answer_to, outcome, spoken

FAILURE = "a restart has failed: fewer than 64 file descriptors are free for an engine (Too many open files)"


def test_an_engine_is_started_again_once_there_are_file_descriptors(
    server: SupervisedServer, client: httpx2.Client, before: Before
) -> None:
    def has_failed_twice() -> bool:
        assert client.get("/live").status_code == 200  # on a connection that is open already
        return server.log.count(FAILURE) >= 2

    pid = server.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    client.get("/live")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (16, hard))
    try:
        server.signal("talker", signal.SIGKILL)
        wait_until(has_failed_twice, ANSWER_TIMEOUT_S, lambda: server.log[-5000:])
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    server.wait_until_up(client)
    assert outcome(answer_to(client, spoken())) == before.speech
    server.wait_for_baseline(client, before.baseline)
