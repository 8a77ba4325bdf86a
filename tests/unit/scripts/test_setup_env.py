"""`scripts/setup-env` with a stand-in for Python that records what pip is asked for."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-c import ensurepip, venv") [[ $HAS_VENV == yes || -e installed ]] ;;
    *libnuma*) [[ $HAS_LIBNUMA == yes || -e installed ]] ;;
    '-m venv --clear '*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    '-m pip install --dry-run '*) [[ $PIP_FINDS_TORCH == yes ]] ;;
    '-m pip install '*) echo "${*:4}" >> "$PIP_LOG" && [[ $PIP_FAILS != yes ]] ;;
    '-m pip --version') ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


@dataclass
class Checkout:
    """A copy of the files that `setup-env` looks at."""

    folder: Path
    environment: dict[str, str]

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.folder / "scripts" / "setup-env", "--python", str(self.folder / "fake-python"), *arguments],
            env=self.environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    def installed(self) -> list[str]:
        """Arguments of every `pip install`, oldest first; emptied by the call."""
        log = Path(self.environment["PIP_LOG"])
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line for line in lines if line != "--quiet --upgrade pip"]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    folder = tmp_path / "check out"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup-env", folder / "scripts")
    system = folder / "scripts" / "setup-system"
    system.write_text('#!/usr/bin/env bash\necho "setup-system $*" >&2; touch installed\n')
    system.chmod(0o755)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
    fake = folder / "fake-python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    (tmp_path / "bin").mkdir()
    environment = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "HOME": os.environ.get("HOME", "/"),
        "REAL_PYTHON": sys.executable,
        "PIP_LOG": str(tmp_path / "pip.log"),
        "PIP_FINDS_TORCH": "yes",
        "PIP_FAILS": "no",
        "HAS_VENV": "yes",
        "HAS_LIBNUMA": "yes",
    }
    return Checkout(folder, environment)


def add_gpu(checkout: Checkout) -> None:
    program = checkout.folder.parent / "bin" / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: some name (UUID: GPU-0)'\n")
    program.chmod(0o755)


def test_without_a_gpu_the_cpu_build_is_installed(checkout: Checkout) -> None:
    finished = checkout.run()

    assert (finished.returncode, finished.stdout) == (0, ".venv\n"), finished.stderr
    assert checkout.installed() == ["torch==2.13.0+cpu", "--editable .[cpu]"]


def test_with_a_gpu_the_cuda_build_is_installed_beside_it(checkout: Checkout) -> None:
    add_gpu(checkout)

    assert checkout.run().stdout == ".venv-cuda\n"
    assert checkout.installed() == ["--editable .[cuda]"]


def test_the_cuda_build_can_be_made_without_a_gpu_which_is_told_first(checkout: Checkout) -> None:
    finished = checkout.run("--cuda")

    assert finished.stdout == ".venv-cuda\n"
    assert "nvidia-smi lists no GPU here" in finished.stderr.splitlines()[0]
    assert checkout.installed() == ["--editable .[cuda]"]


def test_the_cpu_build_can_be_asked_for_beside_a_gpu(checkout: Checkout) -> None:
    add_gpu(checkout)

    assert checkout.run("--cpu").stdout == ".venv\n"


def test_where_pip_does_not_find_the_cpu_torch_it_comes_from_pytorch(checkout: Checkout) -> None:
    checkout.run(PIP_FINDS_TORCH="no")

    assert (
        checkout.installed()[0] == "--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu"
    )


def test_an_index_that_is_named_is_used(checkout: Checkout) -> None:
    checkout.run(OMNI_TORCH_INDEX="https://first.invalid")
    assert checkout.installed()[0] == "--extra-index-url https://first.invalid torch==2.13.0+cpu"

    shutil.rmtree(checkout.folder / ".venv")
    checkout.run("--torch-index", "https://second.invalid", OMNI_TORCH_INDEX="https://first.invalid")
    assert checkout.installed()[0] == "--extra-index-url https://second.invalid torch==2.13.0+cpu"


def test_a_second_start_installs_nothing(checkout: Checkout) -> None:
    checkout.run("--extra", "test")
    checkout.installed()

    for arguments in (["--extra", "test"], []):
        finished = checkout.run(*arguments)
        assert (finished.returncode, finished.stdout, finished.stderr) == (0, ".venv\n", "")
    assert checkout.installed() == []


def test_an_environment_of_another_python_is_made_again(checkout: Checkout) -> None:
    checkout.run("--extra", "test")
    checkout.installed()
    python = checkout.folder / "fake-python"
    python.write_text(FAKE_PYTHON.replace("*) exec", "--version) echo 'Python 3.12.99' ;;\n    *) exec"))

    finished = checkout.run("--extra", "test")
    assert "making .venv with Python 3.12.99" in finished.stderr
    assert checkout.installed() == ["torch==2.13.0+cpu", "--editable .[cpu,test]"]
    assert checkout.run("--extra", "test").stderr == ""


def test_a_new_extra_is_added_to_those_that_are_there(checkout: Checkout) -> None:
    checkout.run("--extra", "test")
    checkout.run("--extra", "dev")
    checkout.installed()

    checkout.run("--extra", "test", "--extra", "dev")
    assert checkout.installed() == []


def test_changed_dependencies_are_installed(checkout: Checkout) -> None:
    checkout.run()
    checkout.installed()
    with (checkout.folder / "pyproject.toml").open("a") as file:
        file.write("# changed\n")

    checkout.run()

    assert "--editable .[cpu]" in checkout.installed()


def test_an_installation_that_failed_is_done_again(checkout: Checkout) -> None:
    assert checkout.run(PIP_FAILS="yes").returncode != 0
    checkout.installed()

    assert checkout.run().returncode == 0
    assert "--editable .[cpu]" in checkout.installed()


def test_a_dry_run_changes_nothing(checkout: Checkout) -> None:
    finished = checkout.run("--dry-run", "--extra", "test")

    assert "pip install --editable .[cpu,test]" in finished.stderr
    assert checkout.installed() == []
    assert not (checkout.folder / ".venv").exists()


def test_an_unsuitable_python_is_refused(checkout: Checkout) -> None:
    finished = checkout.run("--python", "/bin/false")

    assert finished.returncode == 1
    assert finished.stderr.startswith("setup-env: /bin/false is not Python 3.11 or 3.12: ")
    assert finished.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("missing", "packages"),
    [
        ({"HAS_VENV": "no"}, "fake-python-venv"),
        ({"HAS_LIBNUMA": "no"}, "libnuma1"),
        ({"HAS_VENV": "no", "HAS_LIBNUMA": "no"}, "fake-python-venv libnuma1"),
    ],
)
def test_packages_of_the_system_that_are_missing_are_installed_first(
    checkout: Checkout, missing: dict[str, str], packages: str
) -> None:
    finished = checkout.run(**missing)

    assert finished.stderr.splitlines()[0] == f"setup-system {packages}"
    assert (finished.returncode, finished.stdout) == (0, ".venv\n")
    assert checkout.installed() == ["torch==2.13.0+cpu", "--editable .[cpu]"]


def test_the_build_for_gpus_does_without_libnuma(checkout: Checkout) -> None:
    assert "setup-system" not in checkout.run("--cuda", HAS_LIBNUMA="no").stderr


def test_nothing_is_made_if_they_cannot_be_installed(checkout: Checkout) -> None:
    (checkout.folder / "scripts" / "setup-system").write_text("#!/bin/sh\nexit 1\n")

    finished = checkout.run(HAS_VENV="no")

    assert (finished.returncode, finished.stdout, checkout.installed()) == (1, "", [])
