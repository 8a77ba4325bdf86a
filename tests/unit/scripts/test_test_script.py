"""`scripts/test` and `scripts/setup-system`: what they install and run, with stand-ins for all of it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.scripts.test_serve_script import ROOT, write_program

PROGRAMS = ("chromium", "chromedriver", "curl", "espeak-ng", "gcc")
PACKAGES = "chromium chromium-driver curl espeak-ng gcc libc6-dev"
NEEDED_BY_THE_SCRIPTS = ("bash", "dirname", "env", "flock", "cat", "sleep")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose programs say what they are called with, on a system that has nothing else."""
    folder = tmp_path / "check out"
    (folder / "bin").mkdir(parents=True)
    (folder / "scripts").mkdir()
    for name in NEEDED_BY_THE_SCRIPTS:
        program = shutil.which(name)
        assert program is not None
        (folder / "bin" / name).symlink_to(program)
    for name in ("test", "setup-system"):
        shutil.copy(ROOT / "scripts" / name, folder / "scripts")
    write_program(folder / "scripts" / "setup-env", 'echo "setup-env $*" >&2; echo .venv')
    write_program(folder / "scripts" / "setup-consumers", 'echo "setup-consumers $*" >&2')
    write_program(folder / ".venv" / "bin" / "python", 'echo "python $*"')
    return folder


def run(checkout: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "scripts" / script, *arguments],
        env={"PATH": str(checkout / "bin"), "HOME": os.environ.get("HOME", "/")},
        capture_output=True,
        text=True,
        check=False,
    )


def add_setup_system(checkout: Path, *, exit_code: int) -> None:
    write_program(checkout / "scripts" / "setup-system", f'echo "setup-system $*" >&2; exit {exit_code}')


@pytest.mark.parametrize("arguments", [(), ("tests/unit", "-k", "config")])
def test_what_the_tests_need_of_the_system_is_installed(checkout: Path, arguments: tuple[str, ...]) -> None:
    add_setup_system(checkout, exit_code=0)

    finished = run(checkout, "test", *arguments)

    assert finished.returncode == 0
    assert f"setup-system {PACKAGES}" in finished.stderr.splitlines()
    assert "setup-env --cpu --extra test" in finished.stderr.splitlines()
    if arguments:
        assert finished.stdout == f"python -m pytest --durations=25 {' '.join(arguments)}\n"
    else:
        first, second = finished.stdout.splitlines()
        assert first.endswith(" tests/unit")
        assert second.endswith(" --ignore=tests/unit")


def test_what_is_there_is_not_installed(checkout: Path) -> None:
    add_setup_system(checkout, exit_code=0)
    for name in PROGRAMS:
        write_program(checkout / "bin" / name, "")

    assert "setup-system" not in run(checkout, "test").stderr


def test_the_whole_suite_is_not_run_without_them(checkout: Path) -> None:
    add_setup_system(checkout, exit_code=1)

    finished = run(checkout, "test")

    assert (finished.returncode, finished.stdout) == (1, "")


def test_chosen_tests_are_run_without_them(checkout: Path) -> None:
    add_setup_system(checkout, exit_code=1)

    assert run(checkout, "test", "tests/unit/config").stdout.startswith("python -m pytest")


def test_root_installs_packages_with_apt_get_and_others_are_told_how(checkout: Path) -> None:
    write_program(checkout / "bin" / "apt-get", 'echo "apt-get $*"')

    finished = run(checkout, "setup-system", "gcc", "curl")

    install = "apt-get install --yes --no-install-recommends gcc curl"
    if os.geteuid() == 0:
        assert (finished.returncode, finished.stderr) == (0, f"apt-get update\n{install}\n")
    else:
        assert finished.returncode == 1
        assert finished.stderr.endswith(f"this installs it: sudo {install}\n")
    assert finished.stdout == ""


def test_without_apt_get_the_missing_packages_are_named(checkout: Path) -> None:
    finished = run(checkout, "setup-system", "gcc")

    assert finished.returncode == 1
    assert finished.stderr.startswith("missing here: gcc. ")
