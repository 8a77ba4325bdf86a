"""Every command of docs/api.md is run as it stands, against the real server, and what it prints is checked;
every path of the server's own description has a section on the page."""

import base64
import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.integration.server_process import MODEL, ROOT, ServerProcess

PAGE = (ROOT / "docs" / "api.md").read_text()
ADDRESS = "http://127.0.0.1:8091"
DEMO_NAME = "speaking-demo"

Check = Callable[[bytes, Path], None]


def commands() -> list[tuple[str, str]]:
    """Section and text of every command, in the order of the page."""
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        found += [
            (heading, match) for match in re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        ]
    return found


COMMANDS = commands()


def events(printed: bytes) -> list[Any]:
    """The data of server-sent events, without a final `[DONE]`."""
    data = [line.removeprefix("data: ") for line in printed.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def lists_the_model(printed: bytes, folder: Path) -> None:
    answer = json.loads(printed)
    assert answer["object"] == "list"
    assert [(model["id"], model["object"]) for model in answer["data"]] == [(MODEL, "model")]


def describes_the_model(printed: bytes, folder: Path) -> None:
    assert json.loads(printed)["id"] == MODEL


def is_text(printed: bytes, folder: Path) -> None:
    answer = json.loads(printed)
    assert answer["object"] == "chat.completion"
    assert isinstance(answer["choices"][0]["message"]["content"], str)
    assert 1 <= answer["usage"]["completion_tokens"] <= 16


def is_speech(printed: bytes, folder: Path) -> None:
    message = json.loads(printed)["choices"][0]["message"]
    assert message["content"] is None
    assert message["audio"].keys() == {"id", "data", "expires_at", "transcript"}
    assert base64.b64decode(message["audio"]["data"])[:4] == b"RIFF"


def is_streamed_speech(printed: bytes, folder: Path) -> None:
    *chunks, last = events(printed)
    assert printed.endswith(b"data: [DONE]\n\n")
    deltas = [chunk["choices"][0]["delta"].get("audio", {}) for chunk in chunks]
    assert [delta.keys() for delta in deltas if "id" in delta] == [{"id", "transcript"}]
    assert len(base64.b64decode("".join(delta.get("data", "") for delta in deltas))) % 2 == 0
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"]["audio_tokens"] > 0


def is_refusal(param: str, code: str) -> Check:
    def check(printed: bytes, folder: Path) -> None:
        error = json.loads(printed)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["param"], error["code"]) == (param, code)

    return check


def is_mp3(printed: bytes, folder: Path) -> None:
    assert printed == b""
    assert (folder / "speech.mp3").read_bytes()[0] == 0xFF


def is_speech_in_events(printed: bytes, folder: Path) -> None:
    *deltas, done = events(printed)
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert base64.b64decode("".join(delta["audio"] for delta in deltas))
    assert (done["type"], done["usage"]["output_tokens"] > 0) == ("speech.audio.done", True)


def lists_voices(printed: bytes, folder: Path) -> None:
    voices = json.loads(printed)["voices"]
    assert [voice for voice in voices if "alias_of" not in voice] == [
        {"id": name, "name": name} for name in ("Chelsie", "Ethan")
    ]
    assert {"id": "alloy", "name": "alloy", "alias_of": "Chelsie"} in voices


def lists_audio_models(printed: bytes, folder: Path) -> None:
    assert json.loads(printed) == {"models": [{"id": MODEL}]}


def is_transcript(printed: bytes, folder: Path) -> None:
    answer = json.loads(printed)
    assert answer["text"]
    assert answer["usage"]["input_token_details"]["audio_tokens"] > 0


def is_streamed_transcript(printed: bytes, folder: Path) -> None:
    *deltas, done = events(printed)
    assert done["type"] == "transcript.text.done"
    assert "".join(delta["delta"] for delta in deltas) == done["text"]


def is_plain_text(printed: bytes, folder: Path) -> None:
    assert printed.decode().strip()
    assert not printed.startswith(b"{")


def opens_a_session(printed: bytes, folder: Path) -> None:
    head, _, frames = printed.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    event = json.loads(frames[frames.index(b"{") :])  # behind the frame's own header
    assert (event["type"], event["session"]["model"]) == ("session.created", MODEL)


def are_probes(printed: bytes, folder: Path) -> None:
    decoder, rest, answers = json.JSONDecoder(), printed.decode(), []
    while rest:
        answer, end = decoder.raw_decode(rest)
        answers.append(answer)
        rest = rest[end:]
    assert [list(answer) for answer in answers] == [["status"], ["version"], ["server_load"]]


def are_metrics(printed: bytes, folder: Path) -> None:
    assert re.search(rb'^vllm:num_requests_running\{.*stage="thinker"\} \d', printed, re.MULTILINE)


CHECKS: dict[str, Sequence[Check]] = {
    "`GET /v1/models`": (lists_the_model, describes_the_model),
    "`POST /v1/chat/completions`": (
        is_text,
        is_speech,
        is_streamed_speech,
        is_refusal("audio", "missing_required_parameter"),
        is_refusal("modalities", "unsupported_value"),
    ),
    "`POST /v1/audio/speech`": (is_mp3, is_speech_in_events),
    "`GET /v1/audio/voices`": (lists_voices,),
    "`GET /v1/audio/models`": (lists_audio_models,),
    "`POST /v1/audio/transcriptions`": (is_transcript, is_streamed_transcript),
    "`POST /v1/audio/translations`": (is_plain_text,),
    "`POST /v1/images/generations`": (is_refusal("model", "unsupported_value"),),
    "`POST /v1/images/edits`": (is_refusal("model", "unsupported_value"),),
    "`GET /v1/realtime`": (opens_a_session,),
    "`GET /live`, `/ready`, `/health`, `/version`, `/metrics`, `/load`": (are_probes, are_metrics),
    "Errors": (is_refusal("model", "model_not_found"),),
}
CASES = [(heading, check) for heading, checks in CHECKS.items() for check in checks]


def test_every_command_has_its_check() -> None:
    assert [heading for heading, _ in COMMANDS] == [heading for heading, _ in CASES]


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"{number}-{CASES[number][0]}" for number in range(len(CASES))]
)
def test_a_command_does_what_the_page_says(server: ServerProcess, tmp_path: Path, number: int) -> None:
    command = COMMANDS[number][1].replace(ADDRESS, server.url).replace(DEMO_NAME, MODEL)
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # of the checkout, the commands read recordings only

    finished = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=tmp_path,
        env=os.environ | {"LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )

    assert finished.returncode == 0, (finished.stdout + finished.stderr).decode(errors="replace")
    CASES[number][1](finished.stdout, tmp_path)


def test_every_path_has_a_section(server: ServerProcess) -> None:
    paths = httpx2.get(f"{server.url}/openapi.json").json()["paths"]
    headings = " ".join(
        re.findall(r"^## .*$|^`/livez`.*$", PAGE, re.MULTILINE)
    )  # other names are below the heading

    documented = set(re.findall(r"/[a-z0-9_/]+", headings))
    assert documented == {path.removesuffix("/{model_id}") for path in paths} | {"/v1/realtime"}
