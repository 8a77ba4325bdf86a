"""Requests as programs: run as they stand, they ask the server for what the page has asked for."""

import os
import subprocess
import sys
from pathlib import Path

import soundfile

from omni_server.types import ReadAloud, TextPart
from tests.browser.browser import MEDIA, WebPage
from tests.browser.scripted_server import ScriptedServer
from tests.unit.api.fake_generator import SAMPLES, TEXT

QUESTION = 'It\'s "quoted", $HOME, `date`, \\n, 50 % & ü!'


def run_shell(program: str, folder: Path, **environment: str) -> str:
    return _run(["bash", "-c", program], folder, environment)


def run_python(program: str, folder: Path, **environment: str) -> str:
    (folder / "program.py").write_text(program)
    return _run([sys.executable, "program.py"], folder, environment)


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONUTF8": "1"}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | paths | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_chat_is_copied_as_programs_that_ask_the_same(
    page: WebPage, server: ScriptedServer, tmp_path: Path
) -> None:
    page.settle(instructions="Don't shout.", temperature="0.5")
    page.choose(MEDIA / "shapes.png")
    page.ask(QUESTION)
    page.wait_answered()
    asked = server.generator.last_request
    for run, selector in ((run_shell, ".as-curl"), (run_python, ".as-python")):
        program = page.copied(selector)
        printed = run(program, tmp_path)
        assert TEXT.split("\u2028")[0] in printed, program[:500]
        again = server.generator.requests.pop()
        assert [m.role for m in again.messages] == [m.role for m in asked.messages] == ["system", "user"]
        assert again.messages[-1].content[-1] == TextPart(QUESTION)
        assert again.sampling == asked.sampling
        assert again.speech == asked.speech
        assert len(soundfile.read(tmp_path / "answer.wav")[0]) == len(SAMPLES)
        (tmp_path / "answer.wav").unlink()


def test_reading_is_copied_as_programs_that_save_it(
    page: WebPage, server: ScriptedServer, tmp_path: Path
) -> None:
    page.click("#tab-read-aloud")
    page.find("#read-text").send_keys(QUESTION)
    page.find("#format").send_keys("FLAC")
    for run, selector in ((run_shell, "#read-as-curl"), (run_python, "#read-as-python")):
        run(page.copied(selector), tmp_path)
        assert server.generator.tasks.pop() == ReadAloud(QUESTION)
        assert (tmp_path / "speech.flac").read_bytes().startswith(b"fLaC")
        (tmp_path / "speech.flac").unlink()


def test_copies_hold_no_key_and_read_it_from_the_environment(
    page: WebPage, server: ScriptedServer, tmp_path: Path
) -> None:
    server.key = "very-secret"
    page.ask("Hello")
    page.wait("document.querySelector('#key-dialog').open")
    page.find("#key").send_keys("very-secret\n")
    page.wait_answered()
    for run, selector in ((run_shell, ".as-curl"), (run_python, ".as-python")):
        program = page.copied(selector)
        assert "very-secret" not in program
        run(program, tmp_path, OPENAI_API_KEY="very-secret")
