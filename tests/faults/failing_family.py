"""Families with stages that fail when they are told to. Named by the stage configs of these tests alone."""

from pathlib import Path

from omni_server.family import HfOverrides
from stages import qwen3_omni as omni
from stages import qwen3_tts as tts
from stages.qwen3_omni.family import Qwen3OmniFamily, Qwen3OmniModel
from stages.qwen3_tts.family import Qwen3TTSFamily, Qwen3TTSModel
from tests.faults.replaced_models import override_with, register_models
from tests.faults.task_count import answer_signals

MODELS = "tests.faults.failing_models"
OMNI = {"thinker": "FailingThinker", "talker": "FailingTalker", "code2wav": "FailingCode2Wav"}
TTS = {"talker": "FailingTTSTalker", "code2wav": "FailingTTSCode2Wav"}
ENGINE_MODULES = (MODELS, "tests.integration.quick_engines")


class FailingQwen3(Qwen3OmniFamily):
    engine_modules = (*Qwen3OmniFamily.engine_modules, *ENGINE_MODULES)

    def open(self, model_dir: Path) -> Qwen3OmniModel:
        answer_signals()
        return super().open(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return override_with(omni.FAMILY, model_stage, OMNI)

    def register(self) -> None:
        super().register()
        register_failing_models()


class FailingTTS(Qwen3TTSFamily):
    engine_modules = (*Qwen3TTSFamily.engine_modules, *ENGINE_MODULES)

    def open(self, model_dir: Path) -> Qwen3TTSModel:
        answer_signals()
        return super().open(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return override_with(tts.FAMILY, model_stage, TTS)

    def register(self) -> None:
        super().register()
        register_failing_models()


def register_failing_models() -> None:
    register_models(MODELS, OMNI)
    register_models(MODELS, TTS)


qwen3_omni = FailingQwen3()
qwen3_tts = FailingTTS()
