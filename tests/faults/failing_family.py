"""Qwen3-Omni with stages that fail when they are told to. Named by the stage configs of these tests alone."""

from pathlib import Path

from omni_server.family import HfOverrides
from stages.qwen3_omni import FAMILY
from stages.qwen3_omni.family import Qwen3OmniFamily, Qwen3OmniModel
from tests.faults.replaced_models import override_with, register_models
from tests.faults.task_count import answer_signals

MODELS = "tests.faults.failing_models"
CLASSES = {"thinker": "FailingThinker", "talker": "FailingTalker", "code2wav": "FailingCode2Wav"}


class FailingQwen3(Qwen3OmniFamily):
    engine_modules = (*FAMILY.engine_modules, MODELS, "tests.integration.quick_engines")

    def open(self, model_dir: Path) -> Qwen3OmniModel:
        answer_signals()
        return super().open(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return override_with(FAMILY, model_stage, CLASSES)

    def register(self) -> None:
        super().register()
        register_failing_models()


def register_failing_models() -> None:
    register_models(MODELS, CLASSES)


qwen3_omni = FailingQwen3()
