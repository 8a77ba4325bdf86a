"""`omni-server replicas` and the socket on which a server answers it."""

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from omni_server.cli import replicas
from omni_server.cli.main import main
from omni_server.cli.replica_socket import ReplicaSocket
from omni_server.engine.process_files import PREFIX
from omni_server.errors import ReplacementError
from omni_server.omni import AsyncOmni
from omni_server.protocol.replica_control import Replica


class Server:
    """Stands for `AsyncOmni`."""

    class model_info:
        name = "demo"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, float | None]] = []
        self.error: ReplacementError | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    def replicas(self) -> tuple[Replica, ...]:
        return (
            Replica("thinker", 4711, 3, 0, "up"),
            Replica("talker/0", 4712, 12, 0, "draining"),
            Replica("talker/1", None, 0, 2, "failed"),
        )

    async def replace(self, replica: str, timeout_s: float | None) -> int:
        self.asked.append((replica, timeout_s))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return 4713


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"{PREFIX}a"
    folder.mkdir()
    server = Server(folder)
    listening = await ReplicaSocket.open(cast(AsyncOmni, server))
    yield server
    await listening.close()


async def run(*words: str) -> int:
    return await asyncio.to_thread(main, ["replicas", *words])


async def test_the_replicas_are_listed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("server ")
    assert lines[0].endswith(", model demo")
    assert [line.split() for line in lines[1:]] == [
        ["replica", "process", "requests", "restarts", "status"],
        ["thinker", "4711", "3", "0", "up"],
        ["talker/0", "4712", "12", "0", "draining"],
        ["talker/1", "-", "0", "2", "failed"],
    ]


async def test_a_replica_is_replaced(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("replace", "talker/0") == 0
    assert capsys.readouterr().out.startswith("talker/0 was replaced by process 4713, in ")
    assert await run("replace", "talker/0", "--timeout", "5") == 0
    assert server.asked == [("talker/0", None), ("talker/0", 5.0)]


async def test_why_a_replica_is_not_replaced_is_told(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.error = ReplacementError("stage 'thinker' has no other replica")
    assert await run("replace", "thinker") == 1
    assert capsys.readouterr().err == "omni-server: failed: stage 'thinker' has no other replica\n"


async def test_a_server_that_ends_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"{PREFIX}a"
    folder.mkdir()
    server = Server(folder)
    server.gate.clear()
    listening = await ReplicaSocket.open(cast(AsyncOmni, server))
    replacing = asyncio.create_task(run("replace", "talker/0"))
    async with asyncio.timeout(10):
        while not server.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await listening.close()
    assert await replacing == 1
    assert capsys.readouterr().err == "omni-server: failed: the server has ended without an answer\n"


async def test_a_server_that_is_silent_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(replicas, "_ANSWER_TIMEOUT_S", 0.1)
    folder = tmp_path / f"{PREFIX}a"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / "replicas.sock"))
        silent.listen()
        assert await run("list") == 1
    assert "the server has not answered within 0.1 s" in capsys.readouterr().err


async def test_without_a_server_it_is_told_where_was_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{PREFIX}dead").mkdir()
    with socket.socket(socket.AF_UNIX) as dead:  # of a server that was killed
        dead.bind(str(tmp_path / f"{PREFIX}dead" / "replicas.sock"))
    assert await run("list") == 2
    assert f"no server of this user was found in {tmp_path}" in capsys.readouterr().err


async def test_of_several_servers_one_must_be_named(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / f"{PREFIX}b"
    other.mkdir()
    listening = await ReplicaSocket.open(cast(Any, Server(other)))
    try:
        assert await run("replace", "talker/0") == 2
        assert "several servers run here: say which one with --server PID" in capsys.readouterr().err
        assert await run("list", "--server", "1") == 2
        assert "no server with process id 1 of this user" in capsys.readouterr().err
    finally:
        await listening.close()


async def test_what_is_no_command_is_answered(server: Server) -> None:
    reader, writer = await asyncio.open_unix_connection(server.folder / "replicas.sock")
    writer.write(b"hello\n")
    assert b"the server does not understand the command" in await reader.readline()
    writer.close()
