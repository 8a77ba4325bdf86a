"""What native libraries write to standard error, each time in a process of its own: descriptor 2 is the
process's."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60

START = """
import logging, os, subprocess, sys, time
from omni_server.platform.log_format import set_up_logging
from omni_server.platform.native_stderr import redirect_native_stderr
set_up_logging("info", {log_format!r})
redirect_native_stderr()
def native(data): os.write(2, data)
"""


def finished(code: str, log_format: str = "text") -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-c", START.format(log_format=log_format) + code]
    return subprocess.run(command, capture_output=True, check=False, cwd=ROOT, timeout=DEADLINE_S)


def stderr_of(code: str, log_format: str = "text") -> str:
    process = finished(code, log_format)
    assert process.returncode == 0, process.stderr
    assert process.stdout == b""
    return process.stderr.decode()


def messages_of(log: str) -> list[str]:
    """Of a log in which every line is a warning of the native libraries."""
    lines = [re.fullmatch(r"[0-9-]+ [0-9:,]+ WARNING native: (.*)", line) for line in log.splitlines()]
    assert None not in lines, log
    return [line[1] for line in lines if line is not None]


def test_lines_of_libraries_have_the_format_of_the_log() -> None:
    assert messages_of(stderr_of(r"native(b'one\ntwo\n')")) == ["one", "two"]


def test_in_a_log_of_json_they_are_json() -> None:
    lines = [json.loads(line) for line in stderr_of(r"native(b'one\ntwo\n')", "json").splitlines()]
    assert [(line["logger"], line["level"], line["message"]) for line in lines] == [
        ("native", "WARNING", "one"),
        ("native", "WARNING", "two"),
    ]


def test_an_engine_logs_them_too_although_it_has_no_log_of_its_own() -> None:
    code = START.partition("set_up_logging(")[0] + "redirect_native_stderr()\n"
    process = subprocess.run(
        [sys.executable, "-c", code + r"os.write(2, b'one\n')"],
        capture_output=True, check=True, cwd=ROOT, timeout=DEADLINE_S,
    )  # fmt: skip
    assert messages_of(process.stderr.decode()) == ["one"]


def test_a_regular_expression_cannot_write_megabytes() -> None:
    """It made 20,000 lines of xgrammar's."""
    log = stderr_of("import xgrammar; xgrammar.Grammar.from_regex('$a' * 20_000)")
    *lines, last = messages_of(log)
    assert len(lines) == 20
    assert all("regex_converter" in line for line in lines)
    match = re.fullmatch(r"(\d+) more lines of native libraries were dropped", last)
    assert match is not None
    assert int(match[1]) > 1_000
    assert len(log) < 20_000


def test_lines_are_logged_again_after_the_period() -> None:
    code = r"""
import omni_server.platform.native_stderr as module
module.PERIOD_S = 0.5
native(b"x\n" * 30)
logger, found = logging.getLogger("native"), []
logger.addFilter(lambda record: found.append(record.getMessage()) or True)
deadline = time.monotonic() + 30
while not any("10 more" in one for one in found):  # told without another line
    assert time.monotonic() < deadline
    time.sleep(0.01)
native(b"y\n")
"""
    assert messages_of(stderr_of(code)) == ["x"] * 20 + [
        "10 more lines of native libraries were dropped",
        "y",
    ]


def test_lines_are_cut_and_cannot_forge_others() -> None:
    log = stderr_of(r"native(b'a\x1b[31m\rb\xe2\x80\xa8c\xff\n' + b'x' * 3_000_000 + b'\n' + b'end\n')")
    forged, long, *_ = messages_of(log)
    assert forged == "a [31m b c\N{REPLACEMENT CHARACTER}"
    assert long == "x" * 500 + "..."


def test_a_line_without_an_end_is_logged() -> None:
    code = r"""
found = []
logging.getLogger("native").addFilter(lambda record: found.append(record.getMessage()) or True)
native(b"loading...")
deadline = time.monotonic() + 30
while not found:
    assert time.monotonic() < deadline
    time.sleep(0.01)
native(b"done\n")
"""
    assert messages_of(stderr_of(code)) == ["loading...", "done"]


def test_a_full_pipe_does_not_keep_the_process_waiting() -> None:
    """`PyDLL` keeps the interpreter's lock, and between the calls no other thread asks for it."""
    code = r"""
import ctypes
sys.setswitchinterval(1000)
write = ctypes.PyDLL(None).write
data = b"x" * 99 + b"\n"
data *= 80_000
written = write(2, data, len(data))
assert 0 < written < len(data), written
assert write(2, data, len(data)) == -1
sys.setswitchinterval(0.005)
native_was_lost = True
"""
    assert len(messages_of(stderr_of(code))) == 21


def test_what_python_prints_and_logs_is_left_alone() -> None:
    code = r"""
print("print", file=sys.stderr)
sys.__stderr__.write("stream\n")
logging.getLogger("x").info("log\n" * 50)
raise ValueError("at the end")
"""
    process = finished(code)
    assert process.returncode == 1
    log = process.stderr.decode()
    assert log.startswith("print\nstream\n")
    assert log.count("\nlog") == 49
    assert log.endswith("ValueError: at the end\n")
    assert "native" not in log


def test_a_crash_says_where_it_was() -> None:
    process = finished("def crash():\n    os.abort()\ncrash()")
    assert process.returncode == -signal.SIGABRT
    assert b"Fatal Python error: Aborted" in process.stderr
    assert b"in crash" in process.stderr


def test_a_forked_process_starts_without_and_may_do_the_same() -> None:
    code = r"""
pid = os.fork()
if pid == 0:
    native(b"raw\n")
    redirect_native_stderr()
    native(b"in the child\n")
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
native(b"in the parent\n")
"""
    raw, *lines = stderr_of(code).splitlines()
    assert raw == "raw"
    assert messages_of("\n".join(lines)) == ["in the child", "in the parent"]


def test_a_program_that_is_started_writes_to_the_log() -> None:
    code = r"""
command = [sys.executable, "-c", "import sys; print('from a program', file=sys.stderr)"]
subprocess.run(command, check=True)
native(b"after it\n")
"""
    assert messages_of(stderr_of(code)) == ["from a program", "after it"]


def test_a_program_outlives_the_process_and_is_not_kept_waiting() -> None:
    code = r"""
import signal
program = "import os, signal, sys; sys.stdin.read(); signal.signal(signal.SIGPIPE, signal.SIG_IGN)\n" \
    "try: os.write(2, b'x' * 3_000_000)\nexcept BrokenPipeError: print('ended')"
started = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = finished(code)
    assert process.returncode == -signal.SIGKILL
    assert process.stdout == b"ended\n"


@pytest.mark.parametrize("redirected", ["sys.stderr = open(os.devnull, 'w')", "sys.stderr = None"])
def test_another_standard_error_is_left_alone(redirected: str) -> None:
    code = (
        START.partition("set_up_logging(")[0]
        + redirected
        + "\nredirect_native_stderr()\nos.write(2, b'raw\\n')"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT, timeout=DEADLINE_S
    )
    assert process.stderr == b"raw\n"
