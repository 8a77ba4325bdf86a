"""Commands that are printed start this program when they are typed where the user is."""

import subprocess
import sys
from pathlib import Path

import pytest

from omni_server.cli.command_line import program


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, whose environment has the program, and nothing of it in PATH."""
    folder = tmp_path / "check out"
    write_program(folder / ".venv" / "bin")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", [str(folder / ".venv" / "bin" / "omni-server"), "serve"])
    return folder


def write_program(folder: Path) -> None:
    """Prints its own folder."""
    folder.mkdir(parents=True)
    (folder / "omni-server").write_text('#!/bin/sh\ncd "$(dirname "$0")" && pwd -P\n')
    (folder / "omni-server").chmod(0o755)


def run(command: str) -> str:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.strip()


def test_in_the_checkout_it_is_the_path_of_the_environment(checkout: Path) -> None:
    assert run(program()) == str(checkout / ".venv" / "bin")


@pytest.mark.parametrize("folder", ["/", ".venv/bin"])
def test_elsewhere_it_is_a_path_that_works_there(
    checkout: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)

    assert run(program()) == str(checkout / ".venv" / "bin")


def test_with_the_environment_activated_it_is_the_name_alone(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{checkout}/.venv/bin:/usr/bin:/bin")

    assert program() == "omni-server"


def test_the_name_alone_is_not_printed_where_it_starts_another_installation(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path / "other")
    monkeypatch.setenv("PATH", f"{tmp_path}/other:/usr/bin:/bin")

    assert run(program()) == str(checkout / ".venv" / "bin")


def test_without_an_installed_program_it_is_the_module(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["main.py", "serve"])

    assert run(f"PYTHONPATH={Path(__file__).parents[3]} {program()} --version").startswith("omni-server ")


def test_a_folder_that_was_removed_under_the_user_is_no_obstacle(checkout: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    words = f"import sys; sys.argv = [{sys.argv[0]!r}]; "
    words += "from omni_server.cli.command_line import program; print(program())"
    script = f"cd '{gone}' && rmdir '{gone}' && exec \"$0\" -c \"$1\""
    finished = subprocess.run(
        ["bash", "-c", script, sys.executable, words],
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )

    assert finished.stdout.strip() == f"'{checkout}/.venv/bin/omni-server'"
