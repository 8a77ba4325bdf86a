"""What a process that reads a stranger's file may do, and what becomes of it."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_server.errors import InvalidRequestError, OmniError
from omni_server.media.limited_process import Cancellation, Reader, end_programs, read_in_process
from omni_server.media.limited_program import DAMAGED

MEBIBYTE = 1 << 20
REFUSED = 7


def _reader(
    folder: Path, body: str, *, memory: int = 256, cpu_s: int = 60, timeout_s: float = 60.0
) -> Reader:
    """Whose `read` is `body`."""
    module = folder / f"reader_{len(list(folder.iterdir()))}.py"  # a program loads its module once
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    imports = "import os, socket, subprocess, sys, threading, time\n"
    module.write_text(f"{imports}def read(file, output, arguments):\n{lines}    return 0\n")
    return Reader(
        module=module,
        arguments=["an argument"],
        reads="the medium",
        environment={"GIVEN": "yes"},
        max_memory_bytes=memory * MEBIBYTE,
        max_cpu_s=cpu_s,
        timeout_s=timeout_s,
        refusals={DAMAGED: InvalidRequestError("damaged"), REFUSED: InvalidRequestError("refused")},
        too_slow=InvalidRequestError("too slow"),
    )


def _read(reader: Reader, data: bytes = b"") -> bytes:
    with read_in_process(reader, data, Cancellation()) as output:
        return b"".join(output.chunks())


def _refusal(reader: Reader) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        _read(reader)
    return caught.value.message


def _wait_until_gone(pid: int) -> None:
    for _ in range(3_000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _program() -> int:
    """The process of the only program that runs."""
    (program,) = (child for child in _children(os.getpid()) if b"limited_program" in _command_line(child))
    return program


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture(autouse=True)
def programs() -> Iterator[None]:
    """Those of other tests do not run during a test, nor its own afterwards."""
    end_programs()
    yield
    end_programs()


SAY_ID = "output.write(str(os.getpid()).encode()); output.flush()\n"


def test_the_reader_has_the_file_and_its_arguments(tmp_path: Path) -> None:
    body = "output.write(file.read()[::-1]); file.seek(0); output.write(file.read(2) + arguments[0].encode())"
    assert _read(_reader(tmp_path, body), b"abc") == b"cbaab" + b"an argument"


@pytest.mark.parametrize("num_bytes", [99, 101])
def test_another_number_of_bytes_than_agreed_is_a_fault(tmp_path: Path, num_bytes: int) -> None:
    reader = _reader(tmp_path, f"output.write(bytes({num_bytes}))")

    def read() -> None:
        with read_in_process(reader, b"", Cancellation()) as output:
            output.read(100)
            output.check_nothing_left()

    with pytest.raises(InvalidRequestError, match="damaged"):
        read()


@pytest.mark.parametrize(
    "deed",
    [
        "open('/etc/hostname')",
        "open('/proc/self/mem', 'rb')",
        "socket.socket()",
        "os.pipe()",
        "os.memfd_create('more')",
        "subprocess.run(['/bin/true'])",
    ],
)
def test_nothing_can_be_opened(tmp_path: Path, deed: str) -> None:
    body = f"try: {deed}\nexcept OSError as error: output.write(str(error.errno).encode())"
    assert _read(_reader(tmp_path, body)) == b"24"  # EMFILE


def test_the_file_cannot_grow(tmp_path: Path) -> None:
    body = "try: os.ftruncate(0, 1 << 30)\nexcept OSError as error: output.write(str(error.errno).encode())"
    assert _read(_reader(tmp_path, body), b"abc") == b"27"  # EFBIG


def test_memory_has_a_limit(tmp_path: Path) -> None:
    assert _read(_reader(tmp_path, "bytes(50 << 20)")) == b""
    assert _refusal(_reader(tmp_path, "bytes(500 << 20)")) == "damaged"


def test_processor_time_has_a_limit_of_its_own(tmp_path: Path) -> None:
    """Two threads of a decoder may use up in one second what was meant for two."""
    assert _refusal(_reader(tmp_path, "while True: pass", cpu_s=1)) == "too slow"


@pytest.mark.parametrize("first", ["", "os.close(1); "], ids=["hangs", "closes its output and hangs"])
def test_a_reader_that_hangs_has_ended_when_the_caller_is_told(tmp_path: Path, first: str) -> None:
    assert _refusal(_reader(tmp_path, first + "time.sleep(600)", timeout_s=1.0)) == "too slow"
    assert len(_children(_program())) == 1  # it waits for the next file


def test_a_reader_is_ended_when_the_caller_has_enough(tmp_path: Path) -> None:
    reader = _reader(tmp_path, SAY_ID + "while True: output.write(bytes(100))")
    with read_in_process(reader, b"", Cancellation()) as output:
        pid = int(output.read(8).rstrip(b"\0"))
    assert not _is_there(pid)


def test_a_reader_is_ended_when_the_caller_leaves(tmp_path: Path) -> None:
    cancellation = Cancellation()
    with read_in_process(_reader(tmp_path, SAY_ID + "time.sleep(600)"), b"", cancellation) as output:
        chunks = output.chunks()
        pid = int(next(chunks))
        threading.Timer(0.05, cancellation.cancel).start()
        with pytest.raises(OmniError, match="cancelled"):
            next(chunks)
    assert not _is_there(pid)


def test_nothing_is_started_for_a_caller_who_has_left(tmp_path: Path) -> None:
    cancellation = Cancellation()
    cancellation.cancel()
    reader = _reader(tmp_path, f"os.kill({os.getpid()}, 9)")
    with pytest.raises(OmniError, match="cancelled"), read_in_process(reader, b"", cancellation):
        raise AssertionError("nothing to read")


SERVER = """
import sys
from pathlib import Path
from omni_server.media.limited_process import Cancellation, Reader, read_in_process
from omni_server.errors import InvalidRequestError
reader = Reader(Path(sys.argv[1]), [], "", 1 << 28, 60, 60.0, {}, InvalidRequestError("too slow"))
with read_in_process(reader, b"", Cancellation()) as output:
    for chunk in output.chunks(): print(chunk.decode(), flush=True)
"""


def test_a_reader_does_not_outlive_the_server(tmp_path: Path) -> None:
    module = _reader(tmp_path, SAY_ID + "time.sleep(600)").module
    with subprocess.Popen([sys.executable, "-c", SERVER, str(module)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert _is_there(pid)
        server.kill()
    _wait_until_gone(pid)


def test_the_program_does_not_outlive_the_server(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER + "input()", str(_reader(tmp_path, SAY_ID).module)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with server:
        assert server.stdout is not None
        server.stdout.readline()
        (program,) = _children(server.pid)
        *_, waiting = _children(program)
        server.kill()
    _wait_until_gone(program)
    _wait_until_gone(waiting)


def test_each_file_has_a_process_of_its_own(tmp_path: Path) -> None:
    body = "output.write(str((os.getpid(), hasattr(os, 'seen'))).encode()); os.seen = True"
    reader = _reader(tmp_path, body)
    first, second = _read(reader), _read(reader)
    assert first != second
    assert first.endswith(b"False)")
    assert second.endswith(b"False)")


def test_a_process_has_no_descriptor_but_its_own(tmp_path: Path) -> None:
    body = (
        "for number in range(100_000):\n"
        "    try: os.fstat(number); output.write(f'{number} '.encode())\n"
        "    except OSError: pass"
    )
    with socket.socket() as listener:
        os.set_inheritable(listener.fileno(), True)
        reader = _reader(tmp_path, body)
        with read_in_process(reader, b"", Cancellation()) as output:  # while another one runs
            assert b"".join(output.chunks()) == b"0 1 2 "
            assert _read(reader) == b"0 1 2 "


def test_a_program_that_was_killed_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = _reader(tmp_path, "output.write(b'x')")
    assert _read(reader) == b"x"
    program = _program()
    *_, waiting = _children(program)
    os.kill(program, signal.SIGKILL)
    _wait_until_gone(waiting)
    assert _read(reader) == b"x"
    assert _program() != program
    assert "ended with exit code -9" in caplog.text


def test_who_reads_while_the_program_is_killed_is_told(tmp_path: Path) -> None:
    reader = _reader(tmp_path, SAY_ID + "time.sleep(600)")
    with read_in_process(reader, b"", Cancellation()) as output:
        chunks = output.chunks()
        pid = int(next(chunks))
        os.kill(_program(), signal.SIGKILL)
        with pytest.raises(OmniError, match="could not read the medium"):
            next(chunks)
    _wait_until_gone(pid)


def test_a_process_that_was_killed_while_it_waited_is_replaced(tmp_path: Path) -> None:
    reader = _reader(tmp_path, "output.write(b'x')")
    assert _read(reader) == b"x"
    *_, waiting = _children(_program())
    ended = os.pidfd_open(waiting)
    os.kill(waiting, signal.SIGKILL)
    select.select([ended], [], [])
    os.close(ended)
    assert _read(reader) == b"x"


@pytest.mark.parametrize(("status", "message"), [(DAMAGED, "damaged"), (REFUSED, "refused")])
def test_exit_statuses_mean_refusals(tmp_path: Path, status: int, message: str) -> None:
    assert _refusal(_reader(tmp_path, f"return {status}")) == message
    assert _refusal(_reader(tmp_path, f"output.write(bytes(100_000))\nreturn {status}")) == message


@pytest.mark.parametrize("name", ["SEGV", "ABRT", "KILL"])
def test_a_reader_that_crashes_was_given_a_bad_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    assert _refusal(_reader(tmp_path, f"import signal; os.kill(os.getpid(), signal.SIG{name})")) == "damaged"
    assert "was ended by signal" in caplog.text


def test_a_reader_with_a_fault_is_the_servers_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OmniError) as caught:
        _read(_reader(tmp_path, "raise KeyError('what went wrong')"))
    assert (caught.value.status, caught.value.message) == (500, "The server could not read the medium.")
    assert "what went wrong" in caplog.text


def test_a_talkative_reader_is_not_held_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a full pipe, that of its complaints; of which the last are kept."""
    talk = "for _ in range(5000): sys.stderr.write('a line of complaints that nobody wants to read\\n')\n"
    assert _read(_reader(tmp_path, talk + "output.write(b'done')")) == b"done"
    with pytest.raises(OmniError):
        _read(_reader(tmp_path, talk + "raise KeyError('what went wrong')"))
    assert "what went wrong" in caplog.text
    assert len(caplog.text) < 20_000


def test_keys_are_kept_from_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    environment = _read(_reader(tmp_path, "output.write(repr(dict(os.environ)).encode())")).decode()
    assert "'GIVEN': 'yes'" in environment
    assert "secret" not in environment
