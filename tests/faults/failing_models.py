"""Models that raise in their next step once a file says so. They are the real ones otherwise."""

import os
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration

from stages.qwen2_5_omni.code2wav.model import Qwen2_5OmniCode2Wav
from stages.qwen2_5_omni.talker import Qwen2_5OmniTalker
from stages.runtime.diffusion_model import DiffusionBatch
from tests.faults.orders import FOLDER_VARIABLE

MESSAGE = "told to fail"


def fail_if_told(stage: str) -> None:
    """Once for each order."""
    order = Path(os.environ[FOLDER_VARIABLE]) / stage
    if order.exists():
        order.unlink()
        # The one kind of error that code2wav's runner cannot blame on a request.
        raise torch.AcceleratorError(MESSAGE)


class FailingThinker(Qwen2_5OmniThinkerForConditionalGeneration):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fail_if_told("thinker")
        return super().forward(*args, **kwargs)


class FailingTalker(Qwen2_5OmniTalker):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fail_if_told("talker")
        return super().forward(*args, **kwargs)


class FailingCode2Wav(Qwen2_5OmniCode2Wav):
    def sample(self, batch: DiffusionBatch) -> Any:
        fail_if_told("code2wav")
        return super().sample(batch)
