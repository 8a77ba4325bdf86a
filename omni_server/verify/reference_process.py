"""The reference in a process of its own, which can be ended whatever it is doing, and its memory with it."""

import multiprocessing
import os
import pkgutil
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

from omni_server.protocol.parent_watch import watch_parent
from omni_server.reference import ReferenceAnswer, ReferenceFactory, ReferenceJob

END_TIMEOUT_S = 10.0
"""For the process to disappear after SIGKILL."""


@dataclass(frozen=True)
class ReferenceSettings:
    folder: Path
    device: str
    """As torch calls it: cpu, cuda:0."""
    dtype: str
    """Of the autoregressive stages."""
    reference: str
    """`package.module:name` of the family's `ReferenceFactory`."""


class ReferenceFailedError(Exception):
    """No answer of the reference; the message says why, in one line."""


_Message = ReferenceAnswer | str | None
"""What the process sends: an answer, why there is none, or None when the checkpoint is loaded."""


class ReferenceProcess:
    """Started by the constructor; ended by `close`."""

    def __init__(self, settings: ReferenceSettings, *, timeout_s: float) -> None:
        """Loads the checkpoint, for `timeout_s` at most. Raises `ReferenceFailedError`."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, settings), name="reference", daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._receive(timeout_s)
        except BaseException:
            self.close()
            raise

    def answer(self, job: ReferenceJob, *, timeout_s: float) -> ReferenceAnswer:
        """Raises `ReferenceFailedError`; after a timeout or the death of the process, at once."""
        try:
            self._connection.send(job)
        except OSError as error:
            raise ReferenceFailedError("transformers' process has ended before") from error
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
            raise ReferenceFailedError(f"transformers took more than {timeout_s:g} s")
        try:
            message: _Message = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(END_TIMEOUT_S)
            raise ReferenceFailedError(
                f"transformers' process has died (exit code {self._process.exitcode}; -9 may mean that there "
                "is not enough memory)"
            ) from error
        if isinstance(message, str):
            raise ReferenceFailedError(message)
        return message


def _serve(connection: Connection, settings: ReferenceSettings) -> None:
    """What the process does: one job after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this process
    watch_parent()
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the folder
    try:
        factory = cast(ReferenceFactory, pkgutil.resolve_name(settings.reference))  # imports transformers
        reference = factory(settings.folder, device=settings.device, dtype=settings.dtype)
    except Exception as error:  # noqa: BLE001 - transformers and torch raise all kinds of them
        connection.send(f"transformers cannot load the checkpoint: {_in_one_line(error)}")
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
            connection.send(f"transformers failed: {_in_one_line(error)}")


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
