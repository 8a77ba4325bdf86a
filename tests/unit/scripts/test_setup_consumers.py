"""`scripts/setup-consumers` with a stand-in for Python that records what pip is asked for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LISTS = Path("tests/integration/consumers")

FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
    '-m venv --clear '*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    '-m pip install '*) echo "${*:4}" >> "$PIP_LOG" && [[ $PIP_FAILS != yes ]] ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""
ALL = [
    f"--requirement {LISTS}/agents.txt",
    f"--requirement {LISTS}/open-webui.txt",
    f"--no-deps --requirement {LISTS}/open-webui.no-deps.txt",
]


class Checkout:
    """A copy of the files that the script looks at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup-consumers", folder / "scripts")
        (folder / LISTS).mkdir(parents=True)
        for file in (ROOT / LISTS).glob("*.txt"):
            shutil.copy(file, folder / LISTS)
        (folder / "fake-python").write_text(FAKE_PYTHON)
        (folder / "fake-python").chmod(0o755)
        self._log = folder / "pip.log"

    def run(self, *, pip_fails: str = "no") -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "REAL_PYTHON": sys.executable,
            "PIP_LOG": str(self._log),
            "PIP_FAILS": pip_fails,
        }
        script = self.folder / "scripts" / "setup-consumers"
        return subprocess.run(
            [script, self.folder / "fake-python"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def installed(self) -> list[str]:
        """Arguments of every `pip install`, oldest first; emptied by the call."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "check out")


def test_each_list_has_an_environment(checkout: Checkout) -> None:
    finished = checkout.run()

    assert (finished.returncode, finished.stdout) == (0, ".venv-consumers\n"), finished.stderr
    assert checkout.installed() == ALL


def test_a_second_start_installs_nothing(checkout: Checkout) -> None:
    checkout.run()
    checkout.installed()

    finished = checkout.run()

    assert (finished.returncode, finished.stdout, finished.stderr) == (0, ".venv-consumers\n", "")
    assert checkout.installed() == []


def test_an_environment_is_made_anew_when_its_list_changes(checkout: Checkout) -> None:
    checkout.run()
    checkout.installed()

    with (checkout.folder / LISTS / "agents.txt").open("a") as file:
        file.write("another-package\n")
    checkout.run()

    assert checkout.installed() == ALL[:1]


def test_what_failed_is_tried_again(checkout: Checkout) -> None:
    assert checkout.run(pip_fails="yes").returncode != 0
    checkout.installed()

    assert checkout.run().returncode == 0
    assert checkout.installed() == ALL
