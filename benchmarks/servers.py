"""A server for the time of a measurement, in a process of its own."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.5
STOP_TIMEOUT_S = 120.0


@dataclass
class Server:
    process: "subprocess.Popen[bytes]"
    url: str
    ready_s: float

    def cpu_s(self) -> float:
        """CPU time of this process, without its engines."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # proc(5): utime and stime


@contextmanager
def started_server(name: str, command: list[str], path: str, log: Path, timeout_s: float) -> Iterator[Server]:
    """Runs `python -m command` until the end of the block, which begins when a GET of `path` succeeds. Exits
    the program, with the end of the `log`, if it does not within `timeout_s`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [sys.executable, "-m", *command, "--port", str(port)]
    print(" ".join(arguments), flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    url, began = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        while not _answers(url + path):
            ended = process.poll()
            if ended is not None or time.monotonic() > began + timeout_s:
                why = f"was not ready after {timeout_s:.0f} s" if ended is None else f"ended with {ended}"
                sys.exit(f"{name} {why}; {log} ends with\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(POLL_S)
        yield Server(process, url, time.monotonic() - began)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # its engines are of the same session
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):  # somebody wants this to end, too
                raise


def _answers(url: str) -> bool:
    here = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever http_proxy says
    try:
        with here.open(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def end_children_with_this() -> None:
    """Turns signals that end the program into `SystemExit`, so that what has been started is ended, too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def nvidia_smi(figure: str) -> list[str]:
    """One value per GPU; empty without a GPU or driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={figure}", "--format=csv,noheader,nounits"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.splitlines() if ended.returncode == 0 else []
