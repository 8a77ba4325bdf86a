"""The environments of the consumers, and servers whose models call functions or only read aloud."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from omni_server.types import AudioDelta
from tests.browser.scripted_server import ScriptedServer
from tests.integration.server_process import ROOT, free_port, wait_until
from tests.unit.api.fake_generator import MODEL, finished
from tests.unit.api.speech_client import ReadingGenerator

PROGRAMS = Path(__file__).parent / "programs"
WAV = ROOT / "tests" / "data" / "media" / "speech_hello.wav"
PROGRAM_TIMEOUT_S = 300

DEMO_ADDRESS = "127.0.0.1:8091"  # these are in the recipes
NAMES = (
    "speaking-demo",
    "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
    "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
)
Agent = Callable[[str, str, str, str], dict[str, Any]]
"""Consumer, mode, address and model of the server to what the program reports."""


@pytest.fixture(scope="session")
def environments() -> Path:
    """The folder of the consumers' environments, made the first time."""
    made = subprocess.run(
        [ROOT / "scripts" / "setup-consumers", sys.executable],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return ROOT / made.stdout.strip()


@pytest.fixture(scope="session")
def agent(environments: Path, tmp_path_factory: pytest.TempPathFactory) -> Agent:
    """Runs a program of `programs/` with the services that the consumer's recipe makes."""

    def run(consumer: str, mode: str, url: str, model: str) -> dict[str, Any]:
        cascade, realtime, reading, streaming = recipe(consumer, "python", url, model)
        services = tmp_path_factory.mktemp(consumer) / "services.py"
        services.write_text(
            {
                "read": reading,
                "stream": streaming,
                "realtime": realtime,
                "realtime-tool": realtime,
            }.get(mode, cascade)
        )
        command: list[str | Path] = [
            environments / "agents" / "bin" / "python",
            PROGRAMS / f"{consumer}_agent.py",
            mode,
            services,
            WAV,
        ]
        return report_of(command)

    return run


def report_of(command: Sequence[str | Path]) -> dict[str, Any]:
    """Runs a program outside of this environment; returns what it prints."""
    finished = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        env=outside_environment(),
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-5000:]
    report: dict[str, Any] = json.loads(finished.stdout)
    return report


@pytest.fixture(scope="session")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the real API with a scripted model."""
    port = free_port()
    log = tmp_path_factory.mktemp("scripted") / "log.txt"
    command = [sys.executable, "-m", "tests.integration.consumers.scripted_server", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_it_answers(f"{url}/ready", process, log)
        yield url
    finally:
        process.terminate()
        process.wait(60)


READER = replace(
    MODEL,
    name="org/tts-tiny",
    aliases=("tts",),
    voices=("vivian", "ryan"),
    default_voice="vivian",
    outputs=frozenset({"audio"}),
    text_stage=None,
    input_modalities=(),
    reads_text=True,
)
READER_SAMPLES = 24_000


@pytest.fixture
def reader() -> Iterator[ScriptedServer]:
    """The real API with a scripted model that only reads aloud, as Qwen3-TTS does."""
    server = ScriptedServer()
    tone = np.sin(np.arange(READER_SAMPLES // 5, dtype=np.float32) / 20) * np.float32(0.3)
    pieces = [AudioDelta(position * len(tone), tone) for position in range(5)]
    server.generator.model_info = READER
    server.generator.script = [*pieces, finished(codec_tokens=5)]
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def reader_of_pieces() -> Iterator[ScriptedServer]:
    """As `reader`, but it speaks the pieces of a text as they come."""
    server = ScriptedServer()
    server.generator = server.state.generator = ReadingGenerator(READER)
    try:
        yield server
    finally:
        server.close()


def recipe(consumer: str, language: str, url: str, model: str) -> list[str]:
    """The programs of a page of docs/recipes, for this server."""
    page = (ROOT / "docs" / "recipes" / f"{consumer}.md").read_text()
    texts = re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for name in NAMES:
        texts = [text.replace(name, model) for text in texts]
    return [text.replace(DEMO_ADDRESS, httpx2.URL(url).netloc.decode()) for text in texts]


def wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx2.get(url).status_code == 200
        except httpx2.TransportError:
            return False

    wait_until(answers, 120, log.read_text)


def outside_environment(**variables: str) -> dict[str, str]:
    """Without what makes Python and the consumers look at this checkout or at the caller's own accounts."""
    hidden = ("PYTHON", "VIRTUAL_ENV", "OPENAI_", "LIVEKIT_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return kept | variables
