"""The process of the reference: what it cannot do it says, and no wait is without end."""

import time
from pathlib import Path

import pytest

from omni_server.verify.reference_process import ReferenceFailedError, ReferenceProcess, ReferenceSettings


def settings(folder: Path) -> ReferenceSettings:
    return ReferenceSettings(folder, "cpu", "float32", "stages.qwen2_5_omni.reference:Qwen25OmniReference")


def test_a_checkpoint_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        ReferenceFailedError, match=r"^transformers cannot load the checkpoint: \w+: .+$"
    ) as caught:
        ReferenceProcess(settings(tmp_path), timeout_s=120)
    assert "\n" not in str(caught.value)


def test_a_wait_ends_and_so_does_the_process(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ReferenceFailedError, match=r"^transformers took more than 0\.05 s$"):
        ReferenceProcess(settings(tmp_path), timeout_s=0.05)
    assert time.monotonic() - began < 10
