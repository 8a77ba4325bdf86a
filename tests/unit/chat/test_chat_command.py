"""`omni-server chat` against a server of a few lines: what it asks, shows, plays, keeps, and says of
failures."""

import base64
import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omni_server.cli.main import main
from tests.unit.bench.frames import DONE, frame
from tests.unit.bench.scripted_server import Json, Pause, Reply, ScriptedServer

Start = Callable[[Callable[[Json, int], Reply]], ScriptedServer]
SAMPLES = b"\x01\x00\xff\x7f" * 1200  # 0.1 s


def delta(**fields: object) -> bytes:
    return frame({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def end(reason: str = "stop") -> bytes:
    return frame({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def spoken_answer(words: str) -> tuple[bytes, ...]:
    half = len(SAMPLES) // 2
    first, second = (base64.b64encode(part).decode() for part in (SAMPLES[:half], SAMPLES[half:]))
    return (
        delta(role="assistant", audio={"id": "audio_1", "transcript": ""}),
        delta(audio={"transcript": words}),
        delta(audio={"data": first}),
        b": keep-alive\n\n",
        delta(audio={"data": second}),
        delta(audio={"expires_at": 2**33}),
        end(),
        DONE,
    )


def written_answer(*words: str) -> tuple[bytes, ...]:
    return (delta(role="assistant", content=""), *(delta(content=word) for word in words), end(), DONE)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Servers that end with the test. No program that plays audio is found, and no key."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("OMNI_SERVER_API_KEY", raising=False)
    servers: list[ScriptedServer] = []

    def start_server(reply: Callable[[Json, int], Reply]) -> ScriptedServer:
        servers.append(ScriptedServer(reply))
        return servers[-1]

    yield start_server
    for server in servers:
        server.close()


def install(folder: Path, name: str, script: str) -> None:
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)


def pipe_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_one_question_is_answered_on_stdout_and_kept_as_a_wav_file(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(lambda body, number: Reply(spoken_answer("I am Ada.")))
    folder = tmp_path / "answers"

    assert main(["chat", "--url", f"{server.url}/v1/", "--once", "Who are you?", "--save", str(folder)]) == 0

    printed = capsys.readouterr()
    assert printed.out == "I am Ada.\n"
    assert f"scripted at {server.url}, voice Ada" in printed.err
    assert "first text 0." in printed.err
    assert "first audio 0." in printed.err
    assert "0.10 s of speech" in printed.err
    assert str(folder / "answer-001.wav") in printed.err
    with wave.open(str(folder / "answer-001.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
        assert file.readframes(file.getnframes()) == SAMPLES
    assert server.requests == [
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": "Who are you?"}],
            "stream": True,
            "modalities": ["text", "audio"],
            "audio": {"voice": "Ada", "format": "pcm16"},
        }
    ]


def test_files_that_are_there_already_are_kept(start: Start, tmp_path: Path) -> None:
    server = start(lambda body, number: Reply(spoken_answer("Hi.")))
    (tmp_path / "answer-001.wav").write_bytes(b"mine")

    assert main(["chat", "--url", server.url, "--once", "Hello", "--save", str(tmp_path)]) == 0

    assert (tmp_path / "answer-001.wav").read_bytes() == b"mine"
    assert (tmp_path / "answer-002.wav").exists()


def test_each_line_of_stdin_is_a_question_that_follows_the_answers_before_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(lambda body, number: Reply(spoken_answer(f"Answer {number}.")))
    pipe_in(monkeypatch, "First?\n\n  Second?  \n")

    assert main(["chat", "--url", server.url, "--system", "Be brief."]) == 0

    assert capsys.readouterr().out == "Answer 0.\nAnswer 1.\n"
    assert [body["messages"] for body in server.requests] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "First?"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "First?"},
            {"role": "assistant", "content": "Answer 0."},
            {"role": "user", "content": "Second?"},
        ],
    ]


def test_text_that_is_content_and_transcript_is_shown_once(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = (delta(content="Hi.", audio={"transcript": "Hi."}), end(), DONE)
    server = start(lambda body, number: Reply(twice))

    assert main(["chat", "--url", server.url, "--once", "Hello"]) == 0

    assert capsys.readouterr().out == "Hi.\n"


def test_text_only_asks_for_no_speech(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    server = start(lambda body, number: Reply(written_answer("Hel", "lo.")))

    assert main(["chat", "--url", server.url, "--text-only", "--once", "Hi", "--max-tokens", "9"]) == 0

    assert capsys.readouterr().out == "Hello.\n"
    assert server.requests == [
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": "Hi"}],
            "stream": True,
            "max_tokens": 9,
        }
    ]


def test_a_model_without_voices_is_asked_for_text(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    server = start(lambda body, number: Reply(written_answer("Hello.")))
    server.models = {"data": [{"id": "writer", "voices": []}]}

    assert main(["chat", "--url", server.url, "--once", "Hi"]) == 0

    assert "modalities" not in server.requests[0]
    assert "which answers in text only" in capsys.readouterr().err


def test_files_go_with_the_first_question_only(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(lambda body, number: Reply(spoken_answer("I see.")))
    for name in ("question.wav", "picture.png", "film.mp4", "memo.aiff"):
        (tmp_path / name).write_bytes(name.encode())
    pipe_in(monkeypatch, "What is this?\nAnd now?\n")
    words = ["--audio", str(tmp_path / "question.wav"), "--audio", str(tmp_path / "memo.aiff")]
    words += ["--image", str(tmp_path / "picture.png"), "--video", str(tmp_path / "film.mp4")]

    assert main(["chat", "--url", server.url, *words]) == 0

    encoded = {
        name: base64.b64encode(name.encode()).decode() for name in ("question.wav", "picture.png", "film.mp4")
    }
    first, second = (body["messages"] for body in server.requests)
    content = first[0]["content"]  # type: ignore[index, call-overload]
    assert [part["type"] for part in content] == [
        "input_audio",
        "audio_url",
        "image_url",
        "video_url",
        "text",
    ]  # type: ignore[index, union-attr, call-overload]
    assert content[0]["input_audio"] == {"data": encoded["question.wav"], "format": "wav"}  # type: ignore[index, call-overload]
    assert content[1]["audio_url"]["url"].startswith("data:audio/")  # type: ignore[index, call-overload, union-attr]
    assert content[2]["image_url"] == {"url": f"data:image/png;base64,{encoded['picture.png']}"}  # type: ignore[index, call-overload]
    assert content[3]["video_url"] == {"url": f"data:video/mp4;base64,{encoded['film.mp4']}"}  # type: ignore[index, call-overload]
    assert second[-1] == {"role": "user", "content": "And now?"}  # type: ignore[index]


def test_a_recording_alone_is_a_question(start: Start, tmp_path: Path) -> None:
    server = start(lambda body, number: Reply(spoken_answer("Yes.")))
    (tmp_path / "question.mp3").write_bytes(b"ID3")

    assert main(["chat", "--url", server.url, "--audio", str(tmp_path / "question.mp3"), "--once"]) == 0

    [message] = server.requests[0]["messages"]  # type: ignore[misc]
    assert [part["type"] for part in message["content"]] == ["input_audio"]  # type: ignore[index, call-overload, union-attr]


@pytest.mark.parametrize("name", ["aplay", "paplay", "ffplay", "play"])
def test_a_program_that_plays_audio_gets_the_samples(
    start: Start, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(lambda body, number: Reply(spoken_answer("Listen.")))
    install(tmp_path, name, f'echo "$@" > {tmp_path}/words; /bin/cat > {tmp_path}/heard')

    assert main(["chat", "--url", server.url, "--once", "Hi"]) == 0

    assert (tmp_path / "heard").read_bytes() == SAMPLES
    assert "24000" in (tmp_path / "words").read_text()
    assert f"played by {name}" in capsys.readouterr().err


def test_a_program_that_cannot_play_is_told_once_and_the_conversation_goes_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(lambda body, number: Reply(spoken_answer("Listen.")))
    install(tmp_path, "aplay", "echo 'no sound card' >&2; exit 1")
    pipe_in(monkeypatch, "One?\nTwo?\n")

    assert main(["chat", "--url", server.url]) == 0

    printed = capsys.readouterr()
    assert printed.out == "Listen.\nListen.\n"
    assert printed.err.count("aplay does not play: no sound card; going on without audio") == 1


def test_no_play_plays_nothing(start: Start, tmp_path: Path) -> None:
    server = start(lambda body, number: Reply(spoken_answer("Hush.")))
    install(tmp_path, "aplay", f"/bin/cat > {tmp_path}/heard")

    assert main(["chat", "--url", server.url, "--once", "Hi", "--no-play"]) == 0

    assert not (tmp_path / "heard").exists()


def test_signs_that_a_terminal_would_obey_are_not_shown(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(lambda body, number: Reply(written_answer("a\x1b[2J\x07b\tc\nd\x9b1m")))

    assert main(["chat", "--url", server.url, "--once", "Hi", "--text-only"]) == 0

    assert capsys.readouterr().out == "a[2Jb\tc\nd1m\n"


def test_the_key_is_sent_and_comes_from_the_environment_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(lambda body, number: Reply(written_answer("Hello.")))

    assert main(["chat", "--url", server.url, "--once", "Hi", "--api-key", "secret"]) == 0
    monkeypatch.setenv("OMNI_SERVER_API_KEY", "other")
    assert main(["chat", "--url", server.url, "--once", "Hi"]) == 0

    assert server.authorizations == ["Bearer secret", "Bearer other"]


def test_no_server_is_told_with_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9", "--once", "Hi"]) == 2

    message = capsys.readouterr().err
    assert message.startswith(
        "omni-server: error: no server answers at http://127.0.0.1:9 (Connection refused). Is it running? "
        "Start one "
    )
    assert "serve MODEL', or with 'scripts/serve'" in message


BROKEN = base64.b64encode(SAMPLES).decode()[:-3]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            Reply(status=404, body=json.dumps({"error": {"message": "There is no such model."}}).encode()),
            "error: HTTP 404: There is no such model.",
        ),
        (Reply(status=500, body=b"oops"), "error: HTTP 500: oops"),
        (
            Reply((delta(content="Hel"), frame({"error": {"message": "stage 'talker': out of memory"}}))),
            "error: error in the stream: stage 'talker': out of memory",
        ),
        (Reply((delta(content="Hel"),)), "error: the stream ended without [DONE]"),
        (
            Reply((delta(content="Hel"),), break_off=True),
            "error: the connection broke in the middle of the answer",
        ),
        (Reply((b"data: {]\n\n",)), "error: not a chunk of a chat completion: event: json_invalid"),
        (Reply((delta(audio={"data": BROKEN}),)), "error: audio that is not base64"),
    ],
)
def test_a_failure_is_told_and_the_next_question_is_asked_without_it(
    start: Start,
    reply: Reply,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = start(lambda body, number: reply if number == 0 else Reply(written_answer("Fine.")))
    pipe_in(monkeypatch, "One?\nTwo?\n")

    assert main(["chat", "--url", server.url]) == 1

    printed = capsys.readouterr()
    assert message in printed.err.splitlines()
    assert printed.out.endswith("Fine.\n")
    assert server.requests[1]["messages"] == [{"role": "user", "content": "Two?"}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--once"], "--once needs a QUESTION, or a file"),
        (["--text-only", "--voice", "Ada"], "--text-only asks for no speech"),
        (["--max-tokens", "0"], "argument --max-tokens: must be 1 or more"),
    ],
)
def test_a_wrong_command_line_exits_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", *words])

    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--audio", str(tmp_path / "none.wav"), "--once"]) == 2

    assert "none.wav: cannot be read: No such file" in capsys.readouterr().err


class Terminal:
    """The command in a terminal of its own, as a person has it."""

    def __init__(self, *words: str) -> None:
        self._end, theirs = pty.openpty()
        command = [sys.executable, "-m", "omni_server.cli.main", "chat", *words]
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            cwd=Path(__file__).parents[3],
        )
        os.close(theirs)
        self.shown = ""

    def type(self, line: str) -> None:
        os.write(self._end, f"{line}\n".encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end_at_the_prompt(self) -> int:
        """Ctrl-C, and once more if nothing comes of it: between the moment that it shows the prompt and the
        one that it waits for a key, Python's readline takes a signal for later, when the next key comes."""
        for _ in range(6):
            self.interrupt()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
                break
        return self.close()

    def wait_for(self, text: str) -> None:
        """Returns when `text` has been shown since the last call."""
        deadline = time.monotonic() + 60
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            try:
                self.shown += os.read(self._end, 1000).decode()
            except OSError:  # the terminal's other end is closed
                pytest.fail(f"ended without {text!r}: {self.shown}")
        self.shown = self.shown.partition(text)[2]

    def close(self) -> int:
        code = self.process.wait(60)
        os.close(self._end)
        return code


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_stops_an_answer_and_at_the_prompt_ends(start: Start, tmp_path: Path) -> None:
    endless = (delta(content="Well"), delta(content=", first of all"), Pause(3600))
    server = start(lambda body, number: Reply(endless if number == 0 else written_answer("Short.")))
    terminal = Terminal("--url", server.url, "--text-only")

    terminal.wait_for("> ")
    terminal.type("Tell me everything.")
    terminal.wait_for("first of all")
    terminal.interrupt()
    terminal.wait_for("stopped")
    terminal.wait_for("> ")
    wait_until(lambda: server.in_flight == 0)  # the server has noticed: nobody listens any more
    terminal.type("And in short?")
    terminal.wait_for("Short.")
    terminal.wait_for("> ")

    assert terminal.end_at_the_prompt() == 130
    assert server.requests[1]["messages"] == [
        {"role": "user", "content": "Tell me everything."},
        {"role": "assistant", "content": "Well, first of all"},
        {"role": "user", "content": "And in short?"},
    ]


def test_the_prompt_has_commands(start: Start, tmp_path: Path) -> None:
    server = start(lambda body, number: Reply(spoken_answer("Yes.")))
    (tmp_path / "a picture.png").write_bytes(b"PNG")
    terminal = Terminal("--url", server.url, "--no-play")

    terminal.wait_for("> ")
    terminal.type("Hello")
    terminal.wait_for("Yes.")
    terminal.wait_for("> ")
    terminal.type("/picture x")
    terminal.wait_for("'/picture x' is not a command; /help lists them")
    terminal.type("/help")
    terminal.wait_for("forget what has been said")
    terminal.type(f"/image {tmp_path}/none.png")
    terminal.wait_for("cannot be read")
    terminal.type("/new")
    terminal.wait_for("> ")
    terminal.type("/voice Grace")
    terminal.type(f"/image '{tmp_path}/a picture.png'")
    terminal.type("What is this?")
    terminal.wait_for("Yes.")
    terminal.type("/quit")

    assert terminal.close() == 0
    last = server.requests[-1]
    assert last["audio"] == {"voice": "Grace", "format": "pcm16"}
    [message] = last["messages"]  # type: ignore[misc]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]  # type: ignore[index, call-overload, union-attr]
