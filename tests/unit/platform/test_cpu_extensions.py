"""The repair of torchvision, torchaudio and torchcodec beside a CPU torch, in fresh interpreters."""

import subprocess
import sys

import pytest


def run(program: str) -> str:
    """Output of `program` in a new interpreter, where nothing has been imported yet."""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


WORKING = (
    "from torchvision.transforms.v2.functional import resize\n"
    "print(tuple(resize(torch.zeros(3, 8, 8), [4, 4]).shape))\n"
    "print(tuple(torchaudio.transforms.Resample(48_000, 16_000)(torch.zeros(480)).shape))\n"
)
WORKED = ["(3, 4, 4)", "(160,)"]


@pytest.mark.parametrize("first", ["torchvision", "torchaudio"])
def test_torchvision_and_torchaudio_work_when_one_is_imported_before_torch(first: str) -> None:
    assert run(f"import {first}, torch, torchaudio, torchvision\n{WORKING}").splitlines() == WORKED


def test_they_work_when_torch_is_imported_first_and_a_second_call_changes_nothing() -> None:
    """torchcodec loads or fails as a missing package does: its users (vLLM among them) guard the import
    against ImportError only, and then do without."""
    *worked, is_unchanged, torchcodec = run(
        "import omni_server, sys, torch\n"
        "from omni_server.platform.cpu_extensions import autoload\n"
        "before = list(sys.meta_path)\n"
        "autoload()\n"
        "import torchaudio, torchvision\n"
        f"{WORKING}"
        "autoload()\n"
        "print(sys.meta_path == before)\n"
        "try:\n    import torchcodec\n    print('loaded')\nexcept ImportError:\n    print('refused')"
    ).splitlines()
    assert (worked, is_unchanged) == (WORKED, "True")
    assert torchcodec in ("loaded", "refused")


def test_nothing_is_repaired_beside_a_cuda_torch_and_nothing_declared_where_the_libraries_load() -> None:
    # A library that loads declares its own operators; here one that always loads stands in for it.
    assert run(
        "import os, sys\n"
        "os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "import torch\n"
        "from omni_server.platform import cpu_extensions\n"
        "before = list(sys.meta_path)\n"
        "torch.version.cuda = '13.0'\n"
        "cpu_extensions.autoload()\n"
        "print(sys.meta_path == before)\n"
        "cpu_extensions.ctypes.CDLL = lambda path: path\n"
        "cpu_extensions._define_torchvision_operators()\n"
        "print(cpu_extensions._libraries)"
    ).splitlines() == ["True", "[]"]


def test_importing_the_package_imports_neither_torch_nor_vllm() -> None:
    assert (
        run(
            "import sys, omni_server\nprint(sorted({'numpy', 'torch', 'transformers', 'vllm'} & "
            "sys.modules.keys()))"
        )
        == "[]"
    )
