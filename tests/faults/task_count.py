"""How many asyncio tasks the server has: it writes the number into a file when it gets SIGUSR1.

Installed by the family of these tests, which the server opens in its event loop.
"""

import asyncio
import os
import signal
from pathlib import Path

from tests.faults.orders import FOLDER_VARIABLE
from tests.integration.server_process import wait_until

_NAME = "tasks"


def answer_signals() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _write)


def _write() -> None:
    folder = Path(os.environ[FOLDER_VARIABLE])
    unfinished = folder / f"{_NAME}.{os.getpid()}.unfinished"
    unfinished.write_text(str(len(asyncio.all_tasks())))
    unfinished.rename(folder / f"{_NAME}.{os.getpid()}")


def num_tasks(folder: Path, pid: int) -> int:
    """Of the server process `pid`."""
    answer = folder / f"{_NAME}.{pid}"
    os.kill(pid, signal.SIGUSR1)
    wait_until(answer.exists, 30)
    number = int(answer.read_text())
    answer.unlink()
    return number
