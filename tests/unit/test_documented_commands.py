"""The programs themselves parse the flags of each command in README.md, CONTRIBUTING.md and docs/.

tests/integration runs the blocks of the quickstart, the API page and the recipes.
"""

import argparse
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
READERS = ("Qwen/Qwen3-TTS-12Hz-1.7B-Base", "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice")
"""Where the page is about a model that only reads aloud."""


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


def test_models_asked_for_are_the_demo() -> None:
    for page in PAGES:
        for block in blocks(page):
            for name in re.findall(r'"model": "([^"]+)"|\bmodel="([^"]+)"|-F model=(\S+)', block):
                assert "".join(name) in (SPEAKING_DEMO, NOT_SERVED, *READERS), block


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
