"""The program `omni-server`. Ctrl-C ends it without a traceback, even while Python is importing."""

import atexit
import os
import signal
import sys
from types import FrameType


def run() -> None:
    """Run one command and end the process with its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_at_once)
    # Importing NumPy would start OpenBLAS's threads, but engines are forked from a single-threaded process.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from omni_server.cli.main import main

    if sys.argv[1:2] != ["serve"]:  # serve installs its own handlers once there is something to clean up
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_process(main())


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Exits immediately with 130 or 143."""
    os._exit(128 + number)


def _end_process(code: int) -> None:
    """Skips the interpreter's own shutdown, which takes seconds after an import of vLLM and is unsafe with
    threads left behind by an aborted start."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
