"""`scripts/serve`: what it sets up and what it starts, with stand-ins for both."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose programs print what they are called with."""
    folder = tmp_path / "check out"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "serve", folder / "scripts")
    write_program(folder / "scripts" / "setup-env", 'echo "setup-env $*" >&2; echo .venv')
    write_program(folder / ".venv" / "bin" / "omni-server", 'printf "%s\\n" "$@"')
    write_program(
        folder / ".venv" / "bin" / "python", 'echo "make $2" >&2; mkdir "$2"; touch "$2/config.json"'
    )
    return folder


def run(checkout: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`checkout/bin` comes first in PATH."""
    return subprocess.run(
        [checkout / "scripts" / "serve", *arguments],
        env=os.environ | {"PATH": f"{checkout / 'bin'}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=check,
    )


def test_a_model_is_served_with_the_flags_as_they_are(checkout: Path) -> None:
    finished = run(checkout, "some/model", "--port", "9000", "--served-model-name", "two words")

    assert finished.stdout.splitlines() == [
        "serve",
        "some/model",
        "--port",
        "9000",
        "--served-model-name",
        "two words",
    ]
    assert finished.stderr == "setup-env \n"


@pytest.mark.parametrize("arguments", [["--model", "some/model"], ["--port", "9000", "--model=some/model"]])
def test_the_model_may_be_a_flag(checkout: Path, arguments: list[str]) -> None:
    assert run(checkout, *arguments).stdout.splitlines() == ["serve", *arguments]


def test_cuda_is_for_the_setup_and_not_for_the_server(checkout: Path) -> None:
    write_program(checkout / "bin" / "nvidia-smi", "echo 'GPU 0: some name (UUID: GPU-0)'")

    finished = run(checkout, "some/model", "--cuda")

    assert finished.stdout.splitlines() == ["serve", "some/model"]
    assert finished.stderr == "setup-env --cuda\n"


@pytest.mark.parametrize(
    "arguments", [["some/model", "--cpu", "--port", "9000"], ["--port", "9000", "--cpu", "--model=a"]]
)
def test_cpu_is_for_both(checkout: Path, arguments: list[str]) -> None:
    finished = run(checkout, *arguments)

    assert finished.stdout.splitlines() == [
        "serve",
        *(word for word in arguments if word != "--cpu"),
        "--cpu",
    ]
    assert finished.stderr == "setup-env --cpu\n"


@pytest.mark.parametrize("arguments", [["--cuda"], ["some/model", "--cuda"]])
def test_cuda_without_a_gpu_is_refused_before_anything_is_installed(
    checkout: Path, arguments: list[str]
) -> None:
    """On a machine with the device files of a GPU, it does not matter that nvidia-smi fails."""
    write_program(checkout / "bin" / "nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")

    finished = run(checkout, *arguments, check=False)

    if any(Path("/dev").glob("nvidia[0-9]*")):
        assert finished.stderr.startswith("setup-env --cuda\n")
        return
    assert finished.returncode == 2
    (line,) = finished.stderr.splitlines()
    assert line.startswith("serve: --cuda needs an NVIDIA GPU, and this machine has none")
    assert finished.stdout == ""


def test_without_a_model_the_demo_is_served_on_cpu(checkout: Path) -> None:
    finished = run(checkout, "--port", "9000")

    assert finished.stdout.splitlines() == ["serve", "--port", "9000", "--cpu"]
    assert finished.stderr == "setup-env --cpu\n"


def test_help_sets_nothing_up(checkout: Path) -> None:
    finished = run(checkout, "--help")

    assert finished.stdout.startswith("Usage: scripts/serve [MODEL]")
    assert finished.stderr == ""
