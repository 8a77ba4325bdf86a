"""The block that is printed when the server is ready, and its example run by a real shell."""

import base64
import json
import shlex
import subprocess
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from threading import Thread
from typing import Any

import pytest

from omni_server.api.speech import SpeechRequest
from omni_server.api.validation import validate
from omni_server.cli.serve import curl_example, ready_message
from omni_server.types import AboutModel, ModelInfo
from omni_server.types.images import ImageFeatures, ImageSize


def model_info(*, name: str = "demo", voices: tuple[str, ...] = ("Chelsie", "Ethan")) -> ModelInfo:
    return ModelInfo(
        name=name,
        aliases=("second name",),
        voices=voices,
        default_voice=voices[0] if voices else None,
        outputs=frozenset({"text", "audio"}) if voices else frozenset({"text"}),
        text_stage="thinker",
        speech_stage="talker" if voices else None,
        max_model_len=4096,
        input_modalities=("audio",),
        max_media_per_prompt={"audio": 1},
        created=0,
        fingerprint="fp_0123456789",
    )


class Recorder(BaseHTTPRequestHandler):
    """Answers requests for chats and images as the server would, and keeps what was asked."""

    requests: list[tuple[str, dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, body))
        message: dict[str, Any] = {"content": "Hi."}
        if "audio" in body:
            message = {
                "content": None,
                "audio": {"data": base64.b64encode(b"RIFF").decode(), "transcript": "Hi."},
            }
        self.send_response(200)
        self.end_headers()
        images = [{"b64_json": base64.b64encode(b"PNG").decode()}]
        self.wfile.write(json.dumps({"choices": [{"message": message}], "data": images}).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Keeps the test's output clean."""

    def address_string(self) -> str:
        return "client"


@pytest.fixture
def recorder() -> type[Recorder]:
    return type("FreshRecorder", (Recorder,), {"requests": []})


def run_in_shell(model: ModelInfo, folder: Path, recorder: type[Recorder]) -> str:
    """What the example prints that was made for this model and a server of `recorder`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), recorder) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        command = curl_example(f"http://127.0.0.1:{server.server_port}", model)
        output = subprocess.run(
            ["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=True
        )
        server.shutdown()
    return output.stdout


def test_it_names_address_model_voices_and_formats() -> None:
    text = ready_message("http://127.0.0.1:8091", model_info())

    assert "URL      http://127.0.0.1:8091/v1\n" in text
    assert "Page     http://127.0.0.1:8091/\n" in text
    assert "Model    demo, second name\n" in text
    assert "Voices   Chelsie (default), Ethan\n" in text
    assert "Formats  wav, mp3, flac, opus, aac, pcm16\n" in text


def test_it_repeats_what_the_checkpoint_says_about_itself() -> None:
    about = AboutModel(notice="This model knows a few sentences only.")

    assert "  Note     This model knows a few sentences only.\n" in ready_message(
        "http://127.0.0.1:8091", replace(model_info(), about=about)
    )


def test_a_deployment_without_voices_says_so() -> None:
    text = ready_message("http://127.0.0.1:8091", model_info(voices=()))

    assert "Voices   none: this deployment answers in text only\n" in text
    assert "Formats" not in text


@pytest.mark.parametrize("name", ["demo", 'it\'s a "model" with $signs'])
def test_the_example_asks_for_speech_and_writes_the_answer(
    tmp_path: Path, recorder: type[Recorder], name: str
) -> None:
    output = run_in_shell(model_info(name=name), tmp_path, recorder)

    [(path, body)] = recorder.requests
    assert path == "/v1/chat/completions"
    assert body["model"] == name
    assert body["modalities"] == ["text", "audio"]
    assert body["audio"] == {"voice": "Chelsie", "format": "wav"}
    assert (tmp_path / "answer.wav").read_bytes() == b"RIFF"
    assert output == "answer.wav: Hi.\n"


def test_the_example_asks_for_text_where_there_is_no_voice(tmp_path: Path, recorder: type[Recorder]) -> None:
    output = run_in_shell(model_info(voices=()), tmp_path, recorder)

    assert "modalities" not in recorder.requests[0][1]
    assert output == "Hi.\n"


def test_the_example_of_a_model_that_only_reads_aloud_is_speech(
    tmp_path: Path, recorder: type[Recorder]
) -> None:
    run_in_shell(replace(model_info(), outputs=frozenset({"audio"}), text_stage=None), tmp_path, recorder)

    [(path, body)] = recorder.requests
    assert path == "/v1/audio/speech"
    assert validate(SpeechRequest, body).voice == "Chelsie"
    assert (tmp_path / "answer.wav").exists()


def test_the_example_of_a_model_that_generates_images_writes_one(
    tmp_path: Path, recorder: type[Recorder]
) -> None:
    model = replace(
        model_info(voices=()),
        outputs=frozenset({"image"}),
        text_stage=None,
        image_sizes=(ImageSize(32, 32), ImageSize(48, 32)),
    )
    output = run_in_shell(model, tmp_path, recorder)

    [(path, body)] = recorder.requests
    assert path == "/v1/images/generations"
    assert body == {"model": "demo", "prompt": "A lighthouse at dusk"}
    assert (tmp_path / "image.png").read_bytes() == b"PNG"
    assert output == "image.png\n"
    text = ready_message("http://127.0.0.1:8091", model)
    assert "Sizes    32x32, 48x32\n" in text
    assert "Voices" not in text


def test_the_example_of_a_model_that_only_edits_images_sends_one() -> None:
    model = replace(
        model_info(voices=()),
        outputs=frozenset({"image"}),
        text_stage=None,
        image_sizes=(ImageSize(32, 32),),
        image_features=ImageFeatures(max_input_images=1, needs_input_image=True),
    )
    command = shlex.split(curl_example("http://127.0.0.1:1", model))
    assert "http://127.0.0.1:1/v1/images/edits" in command
    assert {"model=demo", "image=@photo.jpg", "prompt=Make it night"} < set(command)


def test_the_example_reaches_a_unix_socket(tmp_path: Path, recorder: type[Recorder]) -> None:
    path = tmp_path / "omni server.sock"
    with ThreadingUnixStreamServer(str(path), recorder) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        command = curl_example(f"unix:{path}", model_info())
        subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=True)
        server.shutdown()

    assert recorder.requests[0][0] == "/v1/chat/completions"
    assert f"URL      unix:{path}\n" in ready_message(f"unix:{path}", model_info())
