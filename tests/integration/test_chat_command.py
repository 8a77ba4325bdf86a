"""`omni-server chat` with the real server, as a user starts it."""

import subprocess
import sys
import wave
from pathlib import Path

from tests.integration.server_process import MODEL, ROOT, ServerProcess

SPOKEN_QUESTION = ROOT / "tests" / "data" / "media" / "speech_hello.wav"


def chat(server: ServerProcess, *words: str, questions: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omni_server.cli.main", "chat", "--url", server.url, "--no-play", *words]
    return subprocess.run(command, input=questions, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_spoken_question_is_answered_by_voice(server: ServerProcess, tmp_path: Path) -> None:
    finished = chat(
        server, "--audio", str(SPOKEN_QUESTION), "--once", "--save", str(tmp_path), "--max-tokens", "16"
    )

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip()
    assert f"{MODEL} at {server.url}, voice" in finished.stderr
    assert "first audio" in finished.stderr
    with wave.open(str(tmp_path / "answer-001.wav")) as answer:
        assert answer.getframerate() == 24_000
        assert any(answer.readframes(answer.getnframes()))


def test_the_second_question_follows_the_first_answer(server: ServerProcess) -> None:
    finished = chat(server, "--max-tokens", "8", questions="Hello, who are you?\nAnd what can you do?\n")

    assert finished.returncode == 0, finished.stderr
    # The demo model may say nothing at all.
    assert len([line for line in finished.stderr.splitlines() if line.startswith("(")]) == 2


def test_text_alone_is_answered(server: ServerProcess) -> None:
    finished = chat(server, "--text-only", "--once", "Hello", "--max-tokens", "8")

    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip()
    assert "first audio" not in finished.stderr


def test_a_voice_that_the_model_lacks_is_told(server: ServerProcess) -> None:
    finished = chat(server, "--voice", "Nobody", "--once", "Hello")

    assert finished.returncode == 1
    assert "error: HTTP 400: Unknown voice: 'Nobody'" in finished.stderr
