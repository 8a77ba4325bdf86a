"""A program that forks as `omni-server serve` does, without vLLM. Used by test_fork_server."""

import json
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from omni_server.engine import fork_server
from omni_server.family import ModelFamily

FAMILY = cast(ModelFamily, SimpleNamespace(engine_modules=("colorsys",)))


def report(path: str) -> None:
    parent = os.getppid()
    Path(f"{path}.new").write_text(
        json.dumps(
            {
                "pid": os.getpid(),
                "fork_server": parent,
                "threads_of_fork_server": len(list(Path(f"/proc/{parent}/task").iterdir())),
                "has_module": "colorsys" in sys.modules,
                "has_state_of_the_program": hasattr(sys, "mark_of_the_program"),
            }
        )
    )
    Path(f"{path}.new").rename(path)
    multiprocessing.parent_process().join()  # type: ignore[union-attr]  # it has been forked for a parent


def main(mode: str, path: str) -> None:
    vars(fork_server)["_MODULES"] = ()
    sys.mark_of_the_program = True  # type: ignore[attr-defined]
    if mode == "with threads":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    fork_server.import_engine_modules(FAMILY)
    fork_server.fork_from_here(FAMILY)
    fork_server.start(FAMILY)  # there is one
    process = fork_server.start_process(report, path)
    sys.stdout.write(f"{process.pid}\n")
    sys.stdout.flush()
    if mode == "unclosed":
        while not Path(path).exists():
            time.sleep(0.01)
        return
    sys.stdin.read()
    process.kill()
    process.join()
    sys.stdout.write(f"{process.exitcode}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
