"""`omni-server replicas`: list the replicas of a running server on this machine, and replace one."""

import argparse
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from omni_server.engine.process_files import PREFIX
from omni_server.errors import ConfigError, OmniError
from omni_server.protocol.replica_control import (
    SOCKET_NAME,
    Answer,
    ListReplicas,
    NotReplaced,
    Question,
    Replaced,
    ReplaceReplica,
    Replicas,
    decode_answer,
    encode,
)

_ANSWER_TIMEOUT_S = 5.0
"""A server answers at once, except that it replaces a replica."""


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Look at the engines of a server that runs on this machine as the same user, and replace one while "
        "the others serve."
    )
    parser.epilog = (
        "The server is found in the folder for temporary files; set TMPDIR as it was set for the server. "
        "docs/scaling.md explains replicas."
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser(
        "list",
        help="list the replicas of all stages",
        description="List the replicas of all stages: process, requests, restarts since the start, and "
        "status.",
        allow_abbrev=False,
    )
    _add_server(listing)
    listing.set_defaults(run=_list)
    replace = actions.add_parser(
        "replace",
        help="replace the engine of one replica",
        description="Replace the engine of one replica without an error for any request: new requests go to "
        "other replicas, those that it has may finish, and the new engine is warmed up before it gets "
        "others. The stage must have another replica that is up. The command returns when it is done.",
        allow_abbrev=False,
    )
    replace.add_argument("replica", metavar="STAGE/N", help="which one, as 'list' shows it, such as talker/1")
    replace.add_argument(
        "--timeout",
        dest="timeout_s",
        type=float,
        metavar="SECONDS",
        help="give up if the replica still has requests then; default: as long as a request may take "
        "(--request-timeout of the server)",
    )
    _add_server(replace)
    replace.set_defaults(run=_replace)


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server", type=int, metavar="PID", help="process id of the server, if several run here"
    )


def _list(options: argparse.Namespace) -> int:
    for number, (_, server) in enumerate(_servers(options.server)):
        if number:
            print()
        print(f"server {server.server_pid}, model {server.model}")
        rows = [("replica", "process", "requests", "restarts", "status")]
        for one in server.replicas:
            pid = "-" if one.pid is None else str(one.pid)
            rows.append((one.name, pid, str(one.num_requests), str(one.num_restarts), one.status))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _replace(options: argparse.Namespace) -> int:
    (path, _), *others = _servers(options.server)
    if others:
        raise ConfigError("several servers run here: say which one with --server PID, as 'list' shows it")
    began = time.monotonic()
    answer = _ask(path, ReplaceReplica(options.replica, options.timeout_s), timeout_s=None)
    if isinstance(answer, NotReplaced):
        raise OmniError(answer.message)
    assert isinstance(answer, Replaced)
    print(f"{options.replica} was replaced by process {answer.pid}, in {time.monotonic() - began:.1f} s")
    return 0


def _servers(pid: int | None) -> list[tuple[Path, Replicas]]:
    """Sockets and answers of the servers that run, or of the one with `pid`. Raises `ConfigError`."""
    servers = [(path, server) for path, server in _running() if pid in (None, server.server_pid)]
    if not servers:
        which = "no server" if pid is None else f"no server with process id {pid}"
        raise ConfigError(
            f"{which} of this user was found in {tempfile.gettempdir()}: set TMPDIR as it is set for the server"
        )
    return servers


def _running() -> Iterator[tuple[Path, Replicas]]:
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{SOCKET_NAME}")):
        with suppress(ConnectionRefusedError, FileNotFoundError, PermissionError):  # a server that was killed
            answer = _ask(path, ListReplicas(), timeout_s=_ANSWER_TIMEOUT_S)
            assert isinstance(answer, Replicas)
            yield path, answer


def _ask(path: Path, question: Question, *, timeout_s: float | None) -> Answer:
    """`timeout_s`: for the answer. A replacement has the server's own deadlines. Raises `OmniError` if the
    server ends or is silent before it answers, and `OSError` if it does not listen."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_ANSWER_TIMEOUT_S)
        client.connect(str(path))
        client.settimeout(timeout_s)
        client.sendall(encode(question))
        with client.makefile("rb") as answers:
            try:
                return decode_answer(answers.readline())
            except (ConnectionError, msgspec.DecodeError) as error:
                raise OmniError("the server has ended without an answer") from error
            except TimeoutError as error:
                raise OmniError(f"the server has not answered within {timeout_s:g} s: {path}") from error
