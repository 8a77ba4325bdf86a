"""`scripts/smoke` must fail where the server is wrong; that it passes where it is right, the integration
tests show."""

import base64
import io
import json
import subprocess
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

ROOT = Path(__file__).parents[3]


class NothingButOk(BaseHTTPRequestHandler):
    """Says 200 to everything, with a body that is never right for a chat request."""

    def do_GET(self) -> None:
        self.answer({"object": "list", "data": [{"id": "demo"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": []})

    def answer(self, body: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Keeps the test's output clean."""


class Speaks(NothingButOk):
    """Answers every request, streamed or not, with a tenth of a second of speech."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setparams((1, 2, 24_000, 0, "NONE", ""))
            writer.writeframes(b"\1\0" * 2400)
        audio = {"data": base64.b64encode(file.getvalue()).decode(), "transcript": "Hello."}
        self.answer({"choices": [{"message": {"audio": audio}}]})


@pytest.fixture
def wrong_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), NothingButOk) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "smoke", *arguments], capture_output=True, text=True, check=False
    )


def test_every_wrong_answer_is_counted(wrong_server: str) -> None:
    finished = run("--url", wrong_server)

    assert finished.returncode == 1
    verdicts = {
        line[6:20].strip(): line[:4].strip()
        for line in finished.stdout.splitlines()[1:-1]
        if line[4:6] == "  "
    }
    assert verdicts == {
        "ready": "ok",
        "text": "FAIL",
        "streamed": "FAIL",
        "speech": "FAIL",
        "speech stream": "FAIL",
        "image": "FAIL",
        "unknown model": "FAIL",
        "broken audio": "FAIL",
        "still healthy": "ok",
    }
    assert finished.stdout.splitlines()[-1] == "7 failed"


def test_a_model_that_is_not_served_is_told(wrong_server: str) -> None:
    finished = run("--url", wrong_server, "--model", "other")

    assert finished.returncode == 1
    assert "other is not among ['demo']" in finished.stderr


def test_the_answer_is_said_to_be_in_a_file_only_where_that_is_kept(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Speaks) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        removed, kept = run("--url", url).stdout, run("--url", url, "--out", str(tmp_path)).stdout
        server.shutdown()

    assert "ok    speech         0.10 s of speech, transcript: 'Hello.'\n" in removed
    assert f"ok    speech         0.10 s of speech in {tmp_path}/answer.wav, transcript: 'Hello.'\n" in kept
    assert (tmp_path / "answer.wav").read_bytes().startswith(b"RIFF")


def test_an_unknown_argument_is_named() -> None:
    finished = run("--prot", "9000")

    assert finished.returncode == 2
    assert finished.stderr.splitlines()[0] == "smoke: unknown argument: --prot"


def test_a_server_that_is_not_there_is_told() -> None:
    finished = run("--url", "http://127.0.0.1:9")

    assert finished.returncode == 1
    assert finished.stderr.endswith("the server is not ready; start one with scripts/serve\n")
