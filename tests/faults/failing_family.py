"""The families with stages that fail when they are told to. Named by the stage configs of these tests
alone."""

from pathlib import Path

from omni_server.family import HfOverrides
from stages.qwen2_5_omni import FAMILY as QWEN2_5_OMNI
from stages.qwen2_5_omni.family import Qwen25OmniFamily, Qwen25OmniModel
from stages.qwen3_omni import FAMILY as QWEN3_OMNI
from stages.qwen3_omni.family import Qwen3OmniFamily, Qwen3OmniModel
from tests.faults.replaced_models import override_with, register_models
from tests.faults.task_count import answer_signals

MODELS = "tests.faults.failing_models"
QWEN25_CLASSES = {
    "thinker": "FailingQwen25Thinker",
    "talker": "FailingQwen25Talker",
    "code2wav": "FailingQwen25Code2Wav",
}
QWEN3_CLASSES = {
    "thinker": "FailingQwen3Thinker",
    "talker": "FailingQwen3Talker",
    "code2wav": "FailingQwen3Code2Wav",
}


class FailingQwen25(Qwen25OmniFamily):
    engine_modules = (*Qwen25OmniFamily.engine_modules, MODELS)

    def open(self, model_dir: Path) -> Qwen25OmniModel:
        answer_signals()
        return super().open(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return override_with(QWEN2_5_OMNI, model_stage, QWEN25_CLASSES)

    def register(self) -> None:
        super().register()
        register_failing_models()


class FailingQwen3(Qwen3OmniFamily):
    engine_modules = (*Qwen3OmniFamily.engine_modules, MODELS)

    def open(self, model_dir: Path) -> Qwen3OmniModel:
        answer_signals()
        return super().open(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return override_with(QWEN3_OMNI, model_stage, QWEN3_CLASSES)

    def register(self) -> None:
        super().register()
        register_failing_models()


def register_failing_models() -> None:
    register_models(MODELS, QWEN25_CLASSES)
    register_models(MODELS, QWEN3_CLASSES)


qwen2_5_omni = FailingQwen25()
qwen3_omni = FailingQwen3()
