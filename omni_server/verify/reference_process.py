"""Runs the reference in a separate process, which can be killed at any time to free its memory."""

import multiprocessing
import os
import pkgutil
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

from omni_server.protocol.parent_watch import watch_parent
from omni_server.protocol.reference import ReferenceAnswer, ReferenceFactory, ReferenceJob

END_TIMEOUT_S = 10.0
"""For the process to exit after SIGKILL."""


class ReferenceFailedError(Exception):
    """The reference gave no answer; the one-line message says why."""


_Message = ReferenceAnswer | str | None
"""The process sends an answer, why there is none, or None once the checkpoint is loaded."""


class ReferenceProcess:
    """The constructor starts it; `close` ends it."""

    def __init__(self, reference: str, folder: Path, *, device: str, dtype: str, timeout_s: float) -> None:
        """Loads the checkpoint within `timeout_s`. `reference` is `package.module:name` of the family's
        `ReferenceFactory`, which takes the other arguments. Raises `ReferenceFailedError`."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, reference, folder, device, dtype)
        self._process = context.Process(target=_serve, args=arguments, name="reference", daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._receive(timeout_s)
        except BaseException:
            self.close()
            raise

    def answer(self, job: ReferenceJob, *, timeout_s: float) -> ReferenceAnswer:
        """Raises `ReferenceFailedError`, immediately once the process has ended or timed out."""
        try:
            self._connection.send(job)
        except OSError as error:
            raise ReferenceFailedError("the reference's process has ended before") from error
        answer = self._receive(timeout_s)
        assert isinstance(answer, ReferenceAnswer)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.join(END_TIMEOUT_S)
        self._connection.close()

    def _receive(self, timeout_s: float) -> ReferenceAnswer | None:
        if not self._connection.poll(timeout_s):
            self.close()
            raise ReferenceFailedError(f"the reference took more than {timeout_s:g} s")
        try:
            message: _Message = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(END_TIMEOUT_S)
            raise ReferenceFailedError(
                f"the reference's process has died (exit code {self._process.exitcode}; -9 may mean that "
                "there is not enough memory)"
            ) from error
        if isinstance(message, str):
            raise ReferenceFailedError(message)
        return message


def _serve(connection: Connection, name: str, folder: Path, device: str, dtype: str) -> None:
    """The process's main loop: one job after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    watch_parent()
    sys.stdout = sys.stderr  # packages print at their import; the report goes to stdout
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the folder
    try:
        factory = cast(ReferenceFactory, pkgutil.resolve_name(name))  # imports it
        reference = factory(folder, device=device, dtype=dtype)
    except Exception as error:  # noqa: BLE001 - transformers and torch raise all kinds of them
        connection.send(f"the reference cannot load the checkpoint: {_in_one_line(error)}")
        return
    connection.send(None)
    while True:
        try:
            job: ReferenceJob = connection.recv()
        except EOFError:
            return
        try:
            connection.send(reference.answer(job))
        except Exception as error:  # noqa: BLE001
            connection.send(f"the reference failed: {_in_one_line(error)}")


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
