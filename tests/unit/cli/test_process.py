"""The process of a command: output that cannot be written does not end it, its limit of file descriptors is
raised, and freed memory goes back to the
system."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_server.cli.process import LossyStream

ROOT = Path(__file__).parents[3]
FULL = "/dev/full"
MISSING = "omni-server: error: MODEL '/nothing': no such folder"


SERVE = ["-m", "omni_server.cli.main", "serve", "/nothing", "--stage-config", "qwen2_5_omni.demo-cpu"]


def serve_of_no_model(redirection: str) -> int:
    """The exit code. It prints a line on standard output before it finds that there is no model."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, *SERVE]
    return subprocess.run(command, cwd=ROOT, timeout=60).returncode


@pytest.mark.parametrize("stdout", [f">{FULL}", ">&-"], ids=["full", "closed"])
def test_output_that_cannot_be_written_does_not_end_the_command(stdout: str, tmp_path: Path) -> None:
    assert serve_of_no_model(f"{stdout} 2>'{tmp_path}/stderr'") == 2
    told = (tmp_path / "stderr").read_text()
    assert MISSING in told
    assert "Traceback" not in told
    is_full = stdout != ">&-"
    assert told.count("standard output cannot be written (No space left on device)") == is_full


@pytest.mark.parametrize("stderr", [f"2>{FULL}", "2>&-"], ids=["full", "closed"])
def test_exit_code_tells_what_nothing_else_can(stderr: str) -> None:
    assert serve_of_no_model(f">{FULL} {stderr}") == 2


PROCESS = """
import multiprocessing, os, sys
from omni_server.cli.process import Printer, drop_unwritable_output

if __name__ == "__main__":
    drop_unwritable_output()
    Printer()("told")
    print("a line of a library, which nobody flushes")
    sys.stderr.write("another")
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    process.start()
    process.join()
    os.write(3, str(process.exitcode).encode())
"""


def test_processes_are_started_where_nothing_can_be_written(tmp_path: Path) -> None:
    """`Process.start` flushes both streams first, and fails if one of them cannot write what it holds."""
    script = tmp_path / "script.py"
    script.write_text(PROCESS)
    command = ["sh", "-c", 'exec "$@" 3>"$0"', str(tmp_path / "told"), sys.executable, str(script)]
    with Path(FULL).open("wb") as full:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, env=environment, stdout=full, stderr=full, timeout=60)
    assert (tmp_path / "told").read_text() == "0"
    assert ended.returncode == 0


def test_what_can_be_written_is_there_at_once_and_whole(tmp_path: Path) -> None:
    """More than a pipe holds, and what could not be written before it is not made up for."""
    text = "\u00e4" * 300_000
    with (tmp_path / "file").open("w", encoding="utf-8") as file, Path(FULL).open("w") as full:
        stream = LossyStream(file)
        print(text, file=stream)
        assert (tmp_path / "file").read_text(encoding="utf-8") == text + "\n"
        assert stream.error is None
        lost = LossyStream(full)
        print(text, file=lost, flush=True)
        assert lost.error is not None
        assert lost.error.strerror == "No space left on device"


def test_reader_that_has_gone_does_not_end_the_command(tmp_path: Path) -> None:
    """As in `omni-server serve ... | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out, (tmp_path / "stderr").open("wb") as err:
        command = [sys.executable, *SERVE]
        assert subprocess.run(command, cwd=ROOT, stdout=out, stderr=err, timeout=60).returncode == 2
    told = (tmp_path / "stderr").read_text()
    assert MISSING in told
    assert "standard output cannot be written (Broken pipe)" in told
    assert "Traceback" not in told


def test_output_that_is_all_that_is_wanted_is_no_success_where_it_cannot_be_written() -> None:
    command = [sys.executable, "-m", "omni_server.cli.main", "config", "show", "qwen2_5_omni.demo-cpu"]
    with Path(FULL).open("wb") as out:
        ended = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode != 0
    assert "No space left on device" in ended.stderr


FREED = """
from pathlib import Path
from omni_server.cli.process import return_freed_memory

def resident_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return int(line.split()[1]) // 1024

return_freed_memory()
bytearray(b"x") * (31 << 20)  # freed at once: from now on glibc would take what is smaller from its heap
before = resident_mib()
blocks = [bytearray(b"x") * (20 << 20) for _ in range(5)]
behind = bytearray(b"x") * 200_000  # the heap cannot shrink below it
held = resident_mib() - before
blocks.clear()
print(held, resident_mib() - before)
"""


def test_large_blocks_are_given_back_when_they_are_freed() -> None:
    process = subprocess.run(
        [sys.executable, "-c", FREED], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    held, kept = map(int, process.stdout.split())
    assert held >= 100
    assert kept < 10


LIMITS = """
import resource, sys
from omni_server.cli.process import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))
raise_descriptor_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_of_descriptors_is_raised_as_far_as_the_system_allows() -> None:
    process = subprocess.run(
        [sys.executable, "-c", LIMITS], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert process.stdout == "(1000, 1000)\n"


def test_too_few_descriptors_are_one_line_and_code_2() -> None:
    command = [sys.executable, "-m", "omni_server.cli.main", "serve"]
    ended = subprocess.run(
        ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert "the limit of file descriptors is 64" in line
