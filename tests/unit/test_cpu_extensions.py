"""The repair of torchvision, torchaudio and torchcodec beside a CPU torch, in fresh interpreters."""

import subprocess
import sys

import pytest


def run(program: str) -> str:
    """Output of `program` in a new interpreter, where nothing has been imported yet."""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


@pytest.mark.parametrize("first", ["torch", "torchvision", "torchaudio", "omni_server"])
def test_torchvision_and_torchaudio_work_whatever_is_imported_first(first: str) -> None:
    assert run(
        f"import {first}, torch, torchaudio, torchvision\n"
        "from torchvision.transforms.v2.functional import resize\n"
        "print(tuple(resize(torch.zeros(3, 8, 8), [4, 4]).shape))\n"
        "print(tuple(torchaudio.transforms.Resample(48_000, 16_000)(torch.zeros(480)).shape))"
    ).splitlines() == ["(3, 4, 4)", "(160,)"]


@pytest.mark.parametrize("first", ["torch", "torchcodec"])
def test_torchcodec_loads_or_fails_as_a_missing_package_does(first: str) -> None:
    # Its users (vLLM among them) guard the import against ImportError only, and then do without.
    assert run(
        f"try:\n    import {first}, torchcodec\n    print('loaded')\nexcept ImportError:\n    print('refused')"
    ) in ("loaded", "refused")


def test_a_second_call_changes_nothing() -> None:
    assert (
        run(
            "import sys, torch\n"
            "from omni_server.cpu_extensions import autoload\n"
            "before = list(sys.meta_path)\n"
            "autoload()\n"
            "import torchvision\n"
            "autoload()\n"
            "print(sys.meta_path == before)"
        )
        == "True"
    )


def test_nothing_is_repaired_beside_a_cuda_torch() -> None:
    assert (
        run(
            "import os, sys\n"
            "os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
            "import torch\n"
            "from omni_server.cpu_extensions import autoload\n"
            "before = list(sys.meta_path)\n"
            "torch.version.cuda = '13.0'\n"
            "autoload()\n"
            "print(sys.meta_path == before)"
        )
        == "True"
    )


def test_nothing_is_declared_where_the_libraries_load() -> None:
    # A library that loads declares its own operators; here one that always loads stands in for it.
    assert (
        run(
            "import torch\n"
            "from omni_server import cpu_extensions\n"
            "cpu_extensions.ctypes.CDLL = lambda path: path\n"
            "cpu_extensions._define_torchvision_operators()\n"
            "print(cpu_extensions._libraries)"
        )
        == "[]"
    )


def test_importing_the_package_imports_neither_torch_nor_vllm() -> None:
    assert (
        run("import sys, omni_server\nprint(sorted({'numpy', 'torch', 'transformers', 'vllm'} & sys.modules.keys()))")
        == "[]"
    )
