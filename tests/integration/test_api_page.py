"""Every command of docs/api.md is run as it stands, against the demo, and prints what the page says; every
path of the server's own description has a section on the page."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.integration.printed import blocks, is_shown_by
from tests.integration.server_process import ROOT, ServerProcess

PAGE = ROOT / "docs" / "api.md"
COMMANDS = [block for block in blocks(PAGE) if block.language == "bash"]
ADDRESS = "http://127.0.0.1:8091"
TO_A_FILE = "-o speech.mp3"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("demo") / "log.txt"
    with ServerProcess(None, log, "--served-model-name", "speaking-demo", stage_config=None) as process:
        yield process


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_a_command_prints_what_the_page_says(demo: ServerProcess, tmp_path: Path, number: int) -> None:
    command = COMMANDS[number]
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # of the checkout, the commands read recordings only

    finished = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command.text.replace(ADDRESS, demo.url)],
        cwd=tmp_path,
        env=os.environ | {"LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )

    output = finished.stdout.decode(errors="replace")
    assert finished.returncode == 0, output + finished.stderr.decode(errors="replace")
    if TO_A_FILE in command.text:
        assert (tmp_path / "speech.mp3").read_bytes()[0] == 0xFF
    elif command.printed is not None:
        assert is_shown_by(command.printed, output), (
            f"the page says\n{command.printed}\nand it prints\n{output}"
        )


def test_what_most_commands_print_is_on_the_page() -> None:
    silent = [command.text for command in COMMANDS if command.printed is None]
    assert [text.split()[2] for text in silent] == [
        f"{ADDRESS}/v1/models/speaking-demo",
        f"{ADDRESS}/v1/audio/speech",
    ]


def test_every_path_has_a_section(demo: ServerProcess) -> None:
    paths = httpx2.get(f"{demo.url}/openapi.json").json()["paths"]
    headings = " ".join(
        re.findall(r"^## .*$|^`/livez`.*$", PAGE.read_text(), re.MULTILINE)
    )  # other names are below the heading

    documented = set(re.findall(r"/[a-z0-9_/]+", headings))
    sockets = {"/v1/realtime", "/v1/audio/speech/stream"}
    assert documented == {path.partition("/{")[0] for path in paths} | sockets
