"""Every command and program of README.md, CONTRIBUTING.md and docs/ is run by a test, or has a reason here.

The flags of commands that no test runs are parsed by the programs themselves.
"""

import argparse
import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_server.cli.main import build_parser
from omni_server.cli.model_flags import SPEAKING_DEMO

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
]

RUN_BY = {
    "docs/api.md": "tests/integration/test_api_page.py::test_a_command_prints_what_the_page_says",
    "docs/quickstart.md": "tests/integration/test_quickstart.py::test_it_works_as_it_stands",
    "docs/realtime.md": (
        "tests/unit/api/realtime/test_socket.py::test_the_example_in_the_documentation_saves_the_answer"
    ),
    "docs/speech.md": "tests/integration/test_server_audio.py::test_commands_of_the_page_work",
    "docs/recipes/livekit.md": (
        "tests/integration/consumers/test_livekit.py::test_its_three_services_work_on_the_demo_server"
    ),
    "docs/recipes/open-webui.md": (
        "tests/integration/consumers/test_open_webui.py::test_the_model_can_be_chosen"
    ),
    "docs/recipes/pipecat.md": (
        "tests/integration/consumers/test_pipecat.py::test_its_three_services_make_a_cascade_on_the_demo_server"
    ),
}
"""Tests that run all there is on a page; test_quickstart.py has reasons of its own for what it leaves out."""

SINGLE = {
    ("README.md", "scripts/serve\n"): (
        "tests/unit/scripts/test_serve_script.py::test_without_a_model_the_demo_is_served_on_cpu"
    ),
    ("README.md", "scripts/serve Qwen/Qwen2.5-Omni-7B"): (
        "tests/unit/scripts/test_serve_script.py::test_a_model_is_served_with_the_flags_as_they_are"
    ),
    ("README.md", "curl -sSf http://127.0.0.1:8091"): (
        "tests/integration/test_quickstart.py::test_it_works_as_it_stands"
    ),
    ("README.md", "import base64"): "tests/integration/test_quickstart.py::test_it_works_as_it_stands",
    ("docs/container.md", "curl -sSf http://127.0.0.1:8091"): (
        "tests/integration/test_quickstart.py::test_it_works_as_it_stands"
    ),
    ("docs/images.md", "import base64"): (
        "tests/integration/test_image_server.py::test_the_example_of_the_page_saves_previews_and_the_image"
    ),
    ("docs/faq.md", "from omni_server import Omni"): (
        "tests/integration/test_quickstart.py::test_the_python_api_works_as_the_page_says"
    ),
    ("docs/scaling.md", "omni-server replicas list"): (
        "tests/unit/cli/test_replicas.py::test_a_replica_is_replaced"
    ),
    ("docs/configuration.md", ".venv/bin/omni-server config show"): (
        "tests/unit/test_documented_commands.py::test_commands_about_configs_work"
    ),
}
NOT_RUN = {
    (
        "CONTRIBUTING.md",
        "scripts/test  ",
    ): "installs packages and runs all tests; CI runs scripts/test",
    ("README.md", "scripts/test\n"): "CI runs it",
    ("docs/images.md", "scripts/serve Qwen/Qwen-Image"): "needs a GPU and downloads 58 GB",
    (
        "docs/images.md",
        'source "$(scripts/setup-env --cpu)/bin/activate"\nscripts/make_demo_checkpoint images',
    ): "installs packages; tests/integration/test_image_server.py serves such a pipeline",
    (
        "docs/images.md",
        ".venv/bin/omni-server check Qwen/Qwen-Image",
    ): "downloads configs; tests/unit/check/test_shipped_configs.py computes the same",
    (
        "docs/images.md",
        "scripts/make_demo_checkpoint qwen-image",
    ): "needs a GPU; tests/unit/stages/diffusers/test_random_weights.py makes the folder",
    ("docs/faq.md", "python3 -m venv env"): "installs 3 GB; tests/unit/test_packaging.py builds the wheel",
    (
        "docs/reliability.md",
        "scripts/make_demo_checkpoint demo",
    ): "measures for minutes what tests/faults asserts",
    ("docs/scaling.md", "CUDA_VISIBLE_DEVICES=0,1,2,3"): "needs 8 GPUs",
    (
        "docs/scaling.md",
        "pip install 'omni-server[cuda,ray]'",
    ): "needs several machines; tests/integration/test_ray.py deploys on a cluster of two nodes",
    ("docs/reliability.md", "scripts/abort_storm demo"): "tests/faults/test_load.py has a shorter storm",
    ("docs/reliability.md", "scripts/soak demo"): "tests/faults/test_load.py has 20 seconds of it",
    ("docs/reliability.md", "scripts/overload demo"): "tests/faults/test_load.py has ten seconds of it",
    ("docs/reliability.md", "scripts/slow_readers"): "measures what tests/unit/api/test_unsent.py asserts",
}
"""Besides these, blocks for Docker, which is missing in CI, and Buildah, which builds an image of 4.5 GB."""

PROGRAMS_OF_OTHERS = {
    *("[", "apt-get", "cd", "curl", "export", "git", "ln", "mkdir", "mmdebstrap", "open-webui", "pip"),
    *("printf", "python3", "ray", "source"),
}
DOCKER_VALUES = {
    *("--build-arg", "--cap-drop", "--cpus", "--entrypoint", "--env", "--env-file", "--file", "--gpus"),
    *("--ipc", "--memory", "--mount", "--name", "--network", "--platform", "--profile", "--publish"),
    *("--restart", "--secret", "--security-opt", "--shm-size", "--tag", "--target", "--tmpfs", "--user"),
    *("--volume", "-e", "-f", "-p", "-t", "-u", "-v"),
}
"""Flags of Docker that take a value."""

NOT_SERVED = "gpt-4o"
"""What docs/api.md asks for to show an error."""


def blocks(page: str) -> list[str]:
    found = re.finditer(
        r"^```(?:bash|sh|console|python)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )
    return [match[1] for match in found]


def shell_blocks(page: str) -> list[str]:
    found = re.finditer(
        r"^```(?:bash|sh|console)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )
    return [match[1] for match in found]


def commands(block: str) -> Iterator[list[str]]:
    """The words of each command, without comments, variables that are set for it, and what it is piped to."""
    text = re.sub(r"(?:^|\s)#.*$", "", block.replace("\\\n", " "), flags=re.MULTILINE)
    text = re.sub(r"^\w+=\$\((.*)\)$", r"\1", text, flags=re.MULTILINE)
    words = shlex.shlex(text, posix=True, punctuation_chars="|&;<>\n")
    words.whitespace = " \t"
    words.whitespace_split = True
    command: list[str] = []
    is_file = False
    for word in [*words, "\n"]:
        if set(word) <= set("<>"):
            is_file = True
        elif set(word) <= set("|&;\n"):
            if command:
                yield command
            command = []
        elif is_file:
            is_file = False
        elif command or not re.match(r"\w+=", word):
            command.append(word)


def needs_containers(block: str) -> bool:
    return any(command[0] in ("docker", "buildah") for command in commands(block))


@pytest.mark.parametrize("page", PAGES)
def test_each_command_is_accounted_for_once(page: str) -> None:
    for block in blocks(page):
        if block in shell_blocks(page) and needs_containers(block):
            continue
        owners = [
            owner
            for (where, start), owner in (SINGLE | NOT_RUN).items()
            if where == page and block.startswith(start)
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
    assert name in {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


class _ParsedError(Exception):
    pass


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program `words[0]` parse the other words. Fails, or raises SystemExit, if it refuses them."""
    program, arguments = words[0], words[1:]
    if program.rpartition("/")[2] == "omni-server":
        _, unknown = build_parser(arguments).parse_known_args(arguments)
        assert not unknown, words
    elif program == "scripts/serve":
        flags = [word for word in arguments if word not in ("--cpu", "--cuda")]
        parse(
            ["omni-server", "serve", *(flags if flags and flags[0][0] != "-" else ["MODEL", *flags])],
            monkeypatch,
        )
    elif program == "docker":
        parse_docker(arguments, monkeypatch)
    elif program == "buildah":
        if "--" in arguments:
            parse(arguments[arguments.index("--") + 1 :], monkeypatch)
    elif program.startswith("scripts/"):
        parse_script(ROOT / program, arguments, monkeypatch)
    else:
        assert program in PROGRAMS_OF_OTHERS, words


def parse_script(script: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if "python" not in script.read_text().partition("\n")[0]:
        # What scripts/test is given goes to pytest.
        last = {"setup-env": ["--dry-run"], "test": ["--help"]}.get(script.name, [])
        first = ["--help"] if not last or script.name == "test" else [*arguments, *last]
        finished = subprocess.run([script, *first], capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stderr
        return
    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(
        self: argparse.ArgumentParser, args: list[str] | None = None, namespace: None = None
    ) -> None:
        parse_args(self, args, namespace)
        raise _ParsedError

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        patch.setattr(sys, "argv", [str(script), *arguments])
        patch.setattr(sys, "path", list(sys.path))
        with pytest.raises((_ParsedError, SystemExit)) as ended:
            runpy.run_path(str(script), run_name="__main__")
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 0  # --help


def parse_docker(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse what Docker passes to the server in our image, to the Dockerfile or to the compose file."""
    command, arguments = words[0], words[1:]
    values: dict[str, list[str]] = {}
    while arguments and arguments[0].startswith("-"):
        flag, equals, value = arguments.pop(0).partition("=")
        if not equals and flag in DOCKER_VALUES:
            value = arguments.pop(0)
        values.setdefault(flag, []).append(value)
    if command == "run":
        image, *flags = arguments
        if "--entrypoint" not in values and flags and (image == "IMAGE" or "omni-server" in image):
            parse(["omni-server", "serve", *flags], monkeypatch)
    elif command == "build":
        known = re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        assert {value.partition("=")[0] for value in values.get("--build-arg", [])} <= set(known)
    elif command == "compose":
        files = [*values.get("-f", []), *values.get("--file", [])]
        assert any((ROOT / name).is_file() for name in files or ["compose.yaml", "docker-compose.yml"]), words


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_flags_that_their_programs_take(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in shell_blocks(page):
        if "<<" not in block:  # a program for another one's standard input
            for command in commands(block):
                parse(command, monkeypatch)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/faq.md"])
def test_commands_in_sentences_have_flags_that_their_programs_take(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`((?:\.venv/bin/)?omni-server \w[^`]*|scripts/\w+ [^`]*)`", text):
        if "--help" not in span:
            parse(shlex.split(span), monkeypatch)


def test_flags_that_a_program_does_not_take_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [
        "omni-server serve MODEL --prot 9000",
        "scripts/serve --prot 9000",
        "scripts/setup-env --extras test",
        "scripts/make_demo_checkpoint demo --sise 7b",
        "docker run -p 8091:8091 omni-server MODEL --prot 9000",
        "docker build --build-arg TARGETS=cpu .",
        "scripts/no-such-script",
    ]
    for line in wrong:
        with pytest.raises((AssertionError, SystemExit, OSError)):
            parse(shlex.split(line), monkeypatch)


def test_the_program_is_named_so_that_a_shell_finds_it() -> None:
    """By its name alone only after the environment has been activated on the same page."""
    lost = [
        (page, line)
        for page in PAGES
        for number, block in enumerate(blocks(page))
        for line in block.splitlines()
        if re.match(r"(.*\| )?omni-server (serve|check|config)\b", line)
        and not any("source .venv" in earlier for earlier in blocks(page)[:number])
    ]
    assert not lost


def test_models_asked_for_are_the_demo() -> None:
    for page in PAGES:
        for block in blocks(page):
            for name in re.findall(r'"model": "([^"]+)"|\bmodel="([^"]+)"|-F model=(\S+)', block):
                assert "".join(name) in (SPEAKING_DEMO, NOT_SERVED), block


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
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m omni_server.cli.main "$@"\n'
    )
    program.chmod(0o755)
    lines = [
        line
        for block in blocks("docs/configuration.md")
        if block.startswith(".venv/bin/omni-server config show")
        for line in block.splitlines()
        if "MODEL" not in line
    ]
    assert len(lines) == 2
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
