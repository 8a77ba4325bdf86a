"""Lines that a user reads while engines start."""

import asyncio
import os
import re
import socket

import pytest

from omni_server.engine.start_progress import StartProgress
from omni_server.protocol.start_report import Phase, ProgressSpec, socket_address
from stages.runtime.engine_start import ProgressReporter


def untimed(lines: list[str]) -> list[str]:
    return [re.sub(r"\d+\.\d s$", "N s", line) for line in lines]


async def until_there_are(num_lines: int, lines: list[str]) -> None:
    async with asyncio.timeout(10):
        while len(lines) < num_lines:  # noqa: ASYNC110 (what is waited for is the event loop's own reading)
            await asyncio.sleep(0.001)


async def test_every_phase_becomes_a_line_as_it_comes() -> None:
    lines: list[str] = []
    with StartProgress(lines.append) as progress:
        reporter = ProgressReporter(progress.began("thinker"))
        for phase in (Phase.LOADING, Phase.LOADED, Phase.COMPILING):
            reporter.report(phase)
        reporter.report(Phase.BUDGETED, "8.0 GB = 5.0 KV cache + 3.0 weights and buffers")
        reporter.report(Phase.CAPTURING)
        await until_there_are(6, lines)
        progress.is_ready("thinker")

    assert untimed(lines) == [
        "thinker: starting",
        "thinker: loading weights",
        "thinker: weights loaded after N s",
        "thinker: compiling",
        "thinker: 8.0 GB = 5.0 KV cache + 3.0 weights and buffers",
        "thinker: capturing CUDA graphs",
        "thinker: ready after N s",
    ]


async def test_other_datagrams_are_dropped() -> None:
    lines: list[str] = []
    with StartProgress(lines.append) as progress:
        spec = progress.began("talker")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            for data in (b"", b"hello", b'{"stage": "talker", "phase": "on fire"}'):
                stranger.sendto(data, socket_address(spec.socket))
        ProgressReporter(spec).report(Phase.LOADING)
        assert progress.last_phase("talker") == "loading weights"

    assert lines == ["talker: starting", "talker: loading weights"]


async def test_two_servers_do_not_hear_each_other() -> None:
    first: list[str] = []
    second: list[str] = []
    with StartProgress(first.append) as one, StartProgress(second.append) as other:
        other.began("talker")
        ProgressReporter(one.began("talker")).report(Phase.LOADING)
        assert (one.last_phase("talker"), other.last_phase("talker")) == ("loading weights", None)


async def test_an_engine_goes_on_when_nobody_listens() -> None:
    with StartProgress(lambda line: None) as progress:
        spec = progress.began("talker")
    ProgressReporter(spec).report(Phase.LOADING)
    ProgressReporter(ProgressSpec("talker", "omni-server-nobody")).report(Phase.LOADING)
    ProgressReporter(None).report(Phase.LOADING)


async def test_an_engine_goes_on_when_the_server_does_not_keep_up() -> None:
    with StartProgress(lambda line: None) as progress:
        reporter = ProgressReporter(progress.began("talker"))
        for _ in range(5000):  # more than a socket's buffer holds
            reporter.report(Phase.LOADING)
        assert progress.last_phase("talker") == "loading weights"


async def test_datagrams_of_another_user_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket's name is no secret on its machine, and what it hears is printed."""
    lines: list[str] = []
    with StartProgress(lines.append) as progress:
        spec = progress.began("talker")
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            ProgressReporter(spec).report(Phase.BUDGETED, "\x1b[2J")
            assert progress.last_phase("talker") is None
        ProgressReporter(spec).report(Phase.LOADING)
        assert progress.last_phase("talker") == "loading weights"
    assert lines == ["talker: starting", "talker: loading weights"]
