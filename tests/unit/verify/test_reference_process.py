"""The process of the reference: what it cannot do it says, and no wait is without end."""

import multiprocessing
from pathlib import Path

import pytest

from omni_server.verify.reference_process import ReferenceFailedError, ReferenceProcess


def start(folder: Path, timeout_s: float) -> None:
    reference = "stages.qwen2_5_omni.reference:Qwen25OmniReference"
    ReferenceProcess(reference, folder, device="cpu", dtype="float32", timeout_s=timeout_s)


def test_a_checkpoint_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ReferenceFailedError, match=r"^the reference cannot load the checkpoint: \w+: .+$"
    ) as caught:
        start(tmp_path, timeout_s=120)
    assert "\n" not in str(caught.value)


def test_a_wait_ends_and_so_does_the_process(tmp_path: Path) -> None:
    with pytest.raises(ReferenceFailedError, match=r"^the reference took more than 0\.05 s$"):
        start(tmp_path, timeout_s=0.05)
    assert not [process for process in multiprocessing.active_children() if process.name == "reference"]
