"""Models that raise in their next step, stay in it or forget, once a file says so. Else they are the real
ones."""

import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from stages.qwen3_omni.code2wav import Qwen3OmniCode2Wav
from stages.qwen3_omni.talker import Qwen3OmniTalker
from stages.qwen3_omni.thinker import Qwen3OmniThinker
from stages.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from stages.qwen3_tts.talker import Qwen3TTSTalker
from stages.qwen_codec.code2wav.model import Code2WavModel
from stages.qwen_codec.codec_window import CodecWindow
from stages.qwen_codec.frame_talker import FrameTalker
from stages.runtime.code_sampling import Choose
from stages.runtime.diffusion_model import DiffusionBatch
from tests.faults.orders import FOLDER_VARIABLE

MESSAGE = "told to fail"


def do_as_told(stage: str) -> None:
    """Once for each order. A step is held until it is let go, or its process ends."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    order, hold, held = folder / stage, folder / f"{stage}.hold", folder / f"{stage}.held"
    if hold.exists():
        hold.rename(held)
        while held.exists():
            time.sleep(0.01)
    if order.exists():
        order.unlink()
        # The one kind of error that code2wav's runner cannot blame on a request.
        raise torch.AcceleratorError(MESSAGE)


class FailingThinker(Qwen3OmniThinker):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        do_as_told("thinker")
        return super().forward(*args, **kwargs)


class _FailingTalker(FrameTalker):
    """Between the first code of a frame, which is sampled, and the others, which it predicts."""

    def predict(self, hidden: torch.Tensor, sampled: torch.Tensor, choose: Choose) -> torch.Tensor:
        do_as_told("talker")
        return super().predict(hidden, sampled, choose)


class FailingTalker(_FailingTalker, Qwen3OmniTalker):
    pass


class FailingTTSTalker(_FailingTalker, Qwen3TTSTalker):
    pass


class _FailingCode2Wav(Code2WavModel):
    def sample(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        order = Path(os.environ[FOLDER_VARIABLE]) / "code2wav.forget"
        if order.exists():
            super().sample(self._strangers())
            with order.open("ab") as file:
                file.write(b".")
        do_as_told("code2wav")
        waveforms: list[torch.Tensor] = super().sample(batch)
        return waveforms

    def _strangers(self) -> DiffusionBatch:
        """The first windows of so many other streams that they need the places of all."""
        names = tuple(uuid.uuid4().hex for _ in range(self._num_slots))
        return DiffusionBatch(
            names,
            tuple(torch.zeros(self._num_codebooks, dtype=torch.int64) for _ in names),
            tuple(CodecWindow(name, 0, is_last=False, past=b"").encode() for name in names),
        )


class FailingCode2Wav(_FailingCode2Wav, Qwen3OmniCode2Wav):
    pass


class FailingTTSCode2Wav(_FailingCode2Wav, Qwen3TTSCode2Wav):
    pass
