"""Every command and program of docs/quickstart.md is run as it stands, against the real server; and those of
README.md and docs/container.md that ask a server something."""

import os
import re
import runpy
import subprocess
import sys
import wave
from pathlib import Path

import pytest

from tests.integration.printed import Block, blocks, is_shown_by
from tests.integration.server_process import MODEL, ROOT, ServerProcess

ADDRESS = "http://127.0.0.1:8091"


BLOCKS = blocks(ROOT / "docs" / "quickstart.md")

NOT_RUN = {
    "scripts/serve\n": "a server runs already",
    "source .venv/bin/activate\n": "the tests run in an environment of their own",
    "scripts/setup-env --cuda\nsource .venv-cuda/bin/activate\n": "installs packages",
    "omni-server check Qwen/Qwen2.5-Omni-7B\n": "needs the hub",
    "omni-server serve Qwen/Qwen2.5-Omni-7B\n": "needs the hub and a GPU",
    "omni-server serve Qwen/Qwen2.5-Omni-7B --stage-config qwen2_5_omni.2gpu\n": "needs the hub and two GPUs",
}
RUN = [block for block in BLOCKS if block.text not in NOT_RUN]
RUN += [
    block
    for page in ("README.md", "docs/container.md")
    for block in blocks(ROOT / page)
    if f"{ADDRESS}/" in block.text
]
CHECKOUT = "/home/you/omni-server"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that has of the checkout what the commands name."""
    for name in ("scripts", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    program = tmp_path / "bin" / "omni-server"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m omni_server.cli.entry "$@"\n'
    )
    program.chmod(0o755)
    return tmp_path


def test_what_is_not_run_is_on_the_page() -> None:
    assert NOT_RUN.keys() <= {block.text for block in BLOCKS}


@pytest.mark.parametrize("block", RUN, ids=[" ".join(block.text.split()[:4]) for block in RUN])
def test_it_works_as_it_stands(server: ServerProcess, checkout: Path, block: Block) -> None:
    text = block.text.replace("speaking-demo", MODEL)
    text = text.replace(ADDRESS, server.url)
    # Their default is the address of the page.
    text = re.sub(r"(scripts/(?:bench_serving|smoke))", rf"\1 --url {server.url}", text)
    interpreter = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
    environment = os.environ | {
        "PATH": f"{checkout / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    }

    finished = subprocess.run(
        [*interpreter, text],
        cwd=checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )

    assert finished.returncode == 0, (finished.stdout + finished.stderr).decode()
    if "omni-server check" in text:
        assert block.printed is not None
        output = finished.stdout.decode().replace(str(ROOT), CHECKOUT)
        assert is_shown_by("..." + block.printed, output), output
    if "-o speech.mp3" in text:
        assert (checkout / "speech.mp3").stat().st_size > 1000
    if "answer.wav" in text:
        with wave.open(str(checkout / "answer.wav")) as file:
            assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)


def test_the_python_api_works_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported vLLM; tests/integration/test_start_output.py starts in a new
    one."""
    (program,) = [
        block.text
        for block in blocks(ROOT / "docs" / "faq.md")
        if block.text.startswith("from omni_server import Omni")
    ]
    monkeypatch.chdir(ROOT)
    (tmp_path / "program.py").write_text(program)
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
    assert re.search(r"\d+\.\d+ seconds$", capsys.readouterr().out.strip())
