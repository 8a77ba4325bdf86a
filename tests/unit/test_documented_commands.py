"""Every command and program of README.md and docs/ is run by a test, or it is said here why none runs it."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]

RUN_BY = {
    "docs/api.md": "tests/integration/test_api_page.py::test_a_command_does_what_the_page_says",
    "docs/quickstart.md": "tests/integration/test_quickstart.py::test_it_works_as_it_stands",
    "docs/realtime.md": (
        "tests/unit/api/realtime/test_socket.py::test_the_example_in_the_documentation_saves_the_answer"
    ),
    "docs/speech.md": "tests/integration/test_server_audio.py::test_commands_of_the_page_work",
    "docs/recipes/livekit.md": (
        "tests/integration/consumers/test_livekit.py::test_its_three_services_work_on_the_demo_server"
    ),
    "docs/recipes/open-webui.md": "tests/integration/consumers/test_open_webui.py::test_the_model_can_be_chosen",
    "docs/recipes/pipecat.md": (
        "tests/integration/consumers/test_pipecat.py::test_its_three_services_make_a_cascade_on_the_demo_server"
    ),
}
"""Tests that run all there is on a page; test_quickstart.py has reasons of its own for what it leaves out."""

SINGLE = {
    ("README.md", "scripts/serve    # sets up"): (
        "tests/unit/scripts/test_serve_script.py::test_without_a_model_the_demo_is_made_once_and_served_on_cpu"
    ),
    ("README.md", "scripts/serve Qwen/Qwen2.5-Omni-7B"): (
        "tests/unit/scripts/test_serve_script.py::test_a_model_is_served_with_the_flags_as_they_are"
    ),
    ("README.md", "curl -sS http://127.0.0.1:8091"): (
        "tests/integration/test_quickstart.py::test_it_works_as_it_stands"
    ),
    ("README.md", "import base64"): "tests/integration/test_quickstart.py::test_it_works_as_it_stands",
    ("README.md", "from omni_server import Omni"): (
        "tests/integration/test_quickstart.py::test_the_python_api_works_as_the_readme_says"
    ),
    ("README.md", ".venv/bin/omni-server config show"): (
        "tests/unit/test_documented_commands.py::test_commands_about_configs_work"
    ),
    ("docs/configuration.md", ".venv/bin/omni-server config show"): (
        "tests/unit/test_documented_commands.py::test_commands_about_configs_work"
    ),
    (
        "README.md",
        "scripts/setup-env --extra",
    ): "tests/unit/scripts/test_setup_env.py::test_a_new_extra_is_added_to_those_that_are_there",
}
NOT_RUN = {
    (
        "README.md",
        "docker build",
    ): "needs Docker and an image of some gigabytes; tests/unit/test_packaging.py reads the file",
    ("docs/operating.md", "docker run"): "needs Docker and a GPU",
    ("docs/reliability.md", "scripts/make_demo_checkpoint demo"): "measures for minutes what tests/faults asserts",
    ("docs/reliability.md", "scripts/abort_storm demo"): "tests/faults/test_load.py has a shorter storm",
    ("docs/reliability.md", "scripts/soak demo"): "tests/faults/test_load.py has half a minute of it",
    ("docs/reliability.md", "scripts/overload demo"): "tests/faults/test_load.py has ten seconds of it",
    ("docs/reliability.md", "scripts/slow_readers"): "measures what tests/unit/api/test_unsent.py asserts",
}


NOT_SERVED = "gpt-4o"
"""What docs/api.md asks for to show an error."""


def blocks(page: str) -> list[str]:
    found = re.finditer(
        r"^```(?:bash|sh|console|python)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )
    return [match[1] for match in found]


@pytest.mark.parametrize("page", PAGES)
def test_each_command_is_accounted_for_once(page: str) -> None:
    for block in blocks(page):
        owners = [
            owner for (where, start), owner in (SINGLE | NOT_RUN).items() if where == page and block.startswith(start)
        ]
        owners += [RUN_BY[page]] if page in RUN_BY else []
        assert len(owners) == 1, block


def test_the_realtime_page_has_the_one_program_that_its_test_runs() -> None:
    assert len(blocks("docs/realtime.md")) == 1


def test_no_account_is_of_a_command_that_is_gone() -> None:
    assert all(blocks(page) for page in RUN_BY)
    for page, start in SINGLE | NOT_RUN:
        assert any(block.startswith(start) for block in blocks(page)), (page, start)


@pytest.mark.parametrize("owner", sorted({*RUN_BY.values(), *SINGLE.values()}))
def test_the_tests_that_are_named_exist(owner: str) -> None:
    file, name = owner.split("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_program_is_named_so_that_a_shell_finds_it() -> None:
    """By its name alone only after the environment has been activated on the same page."""
    lost = [
        (page, line)
        for page in PAGES
        for number, block in enumerate(blocks(page))
        for line in block.splitlines()
        if re.match(r"(.*\| )?omni-server (serve|chat|bench|check|config)\b", line)
        and not any("source .venv" in earlier for earlier in blocks(page)[:number])
    ]
    assert not lost


def test_names_of_the_model_are_those_that_scripts_serve_serves() -> None:
    served = re.search(r"--served-model-name (\S+)", (ROOT / "scripts" / "serve").read_text())
    assert served is not None
    for page in PAGES:
        for block in blocks(page):
            for name in re.findall(r'"model": "([^"]+)"|\bmodel="([^"]+)"|-F model=(\S+)', block):
                assert "".join(name) in (served[1], NOT_SERVED), block


def test_files_that_are_sent_are_in_the_checkout() -> None:
    sent = [
        file
        for page in PAGES
        for block in blocks(page)
        for file in re.findall(r'=@(\S+)|--audio (\S+)|(?:read|Path)\("([^"]+)"', block)
    ]
    assert len(sent) > 5
    for file in sent:
        assert (ROOT / "".join(file)).is_file(), file


def test_commands_about_configs_work(tmp_path: Path) -> None:
    """All but `omni-server serve` and `check` of a MODEL, which the pages leave open."""
    program = tmp_path / ".venv" / "bin" / "omni-server"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m omni_server.cli.main "$@"\n')
    program.chmod(0o755)
    lines = [
        line
        for page in ("README.md", "docs/configuration.md")
        for block in blocks(page)
        if block.startswith(".venv/bin/omni-server config show")
        for line in block.splitlines()
        if "MODEL" not in line
    ]
    assert len(lines) == 3
    finished = subprocess.run(
        ["bash", "-euc", "\n".join(lines)],
        cwd=tmp_path,
        env=os.environ | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "mine.yaml").read_text().startswith("model_family:")
