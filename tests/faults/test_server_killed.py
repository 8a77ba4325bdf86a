"""kill -9 of the server, and signals while it starts: no engine outlives it, and the next start finds
nothing."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from omni_server.engine.process_files import sweep_dead_folders
from omni_server.transport.slab_queue import sweep_dead_queues
from tests.faults.supervised_server import Listening, SupervisedServer
from tests.faults.test_shutdown import END_TIMEOUT_S, engine_folders
from tests.integration.server_process import is_running, wait_until
from tests.integration.test_server import ENDLESS, STREAM, written


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files of the servers that are killed."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


class BusyServer(SupervisedServer):
    """With what is left of it after it was killed."""

    def queue_files(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"omni-server-{self.process.pid}-*"))


class StartingServer(BusyServer):
    """The constructor returns when the engines' processes are there, and know nothing yet."""

    def _wait_until_ready(self) -> None:
        # Other processes than engines come and go before: vLLM's, which look at classes of models.
        wait_until(
            lambda: bool(self.queue_files()) and len(self.process_tree()) >= 5,
            END_TIMEOUT_S,
            lambda: self.log,
        )


def check_swept(server: BusyServer, own_folder: Path) -> None:
    """As the next start does it."""
    assert len(server.queue_files()) <= 1  # another server that starts now sweeps it, too
    assert len(engine_folders(own_folder)) == 1
    sweep_dead_queues()
    assert server.queue_files() == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(own_folder))
        assert len(sweep_dead_folders()) == 1
    assert not [path for path in own_folder.iterdir() if path.is_socket() or path.name.startswith("vllm")]
    server.wait_until_nothing_is_left()


def test_server_killed_while_it_restarts_a_stage_and_speaks_takes_all_engines_with_it(
    checkpoint: Path, own_folder: Path, tmp_path: Path
) -> None:
    server = BusyServer(checkpoint, tmp_path / "log.txt")
    try:
        with server.client() as client:
            tree = set(server.process_tree())
            # Ctrl-C in a terminal reaches the server alone.
            assert os.getpgid(server.process.pid) not in {os.getpgid(pid) for pid in server.engine_pids()}
            server.signal("talker", signal.SIGKILL)
            wait_until(lambda: bool(set(server.process_tree()) - tree), END_TIMEOUT_S)
            text = Listening(client, written(**ENDLESS, **STREAM))
            text.until("content")
            server.kill()
            with pytest.raises(httpx2.TransportError):
                text.rest()
        check_swept(server, own_folder)
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_server_ended_while_it_starts_takes_all_engines_with_it(
    number: signal.Signals, checkpoint: Path, own_folder: Path, tmp_path: Path
) -> None:
    server = StartingServer(checkpoint, tmp_path / "log.txt")
    try:
        if number == signal.SIGKILL:
            server.kill()
            check_swept(server, own_folder)
            return
        tree = server.process_tree()
        for pid in tree:
            with suppress(ProcessLookupError):  # vLLM's come and go
                os.kill(pid, number)
        assert server.process.wait(END_TIMEOUT_S) == 128 + signal.SIGTERM, server.log
        wait_until(lambda: not any(map(is_running, tree)), END_TIMEOUT_S)
        assert engine_folders(own_folder) == []
        server.wait_until_nothing_is_left()
        assert "Traceback" not in server.log
    finally:
        server.process.kill()
        server.process.wait()
