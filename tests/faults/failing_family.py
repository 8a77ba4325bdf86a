"""Qwen2.5-Omni with stages that fail when they are told to. Named by the stage config of these tests
alone."""

from pathlib import Path
from typing import Any

from omni_server.family import HfOverrides
from stages.qwen2_5_omni.family import Qwen25OmniFamily, Qwen25OmniModel
from stages.qwen2_5_omni.hf_overrides import code2wav_config, talker_config
from tests.faults.task_count import answer_signals

CLASSES = {"thinker": "FailingThinker", "talker": "FailingTalker", "code2wav": "FailingCode2Wav"}


class FailingFamily(Qwen25OmniFamily):
    engine_modules = (*Qwen25OmniFamily.engine_modules, "tests.faults.failing_models")

    def open(self, model_dir: Path) -> Qwen25OmniModel:
        answer_signals()
        return super().open(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return {"thinker": failing_thinker, "talker": failing_talker, "code2wav": failing_code2wav}[
            model_stage
        ]

    def register(self) -> None:
        super().register()
        register_failing_models()


def register_failing_models() -> None:
    from vllm import ModelRegistry

    from tests.faults import failing_models

    for name in CLASSES.values():
        ModelRegistry.register_model(name, vars(failing_models)[name])


def failing_thinker(config: Any) -> Any:
    return _with_class(config, "thinker")


def failing_talker(config: Any) -> Any:
    return _with_class(talker_config(config), "talker")


def failing_code2wav(config: Any) -> Any:
    return _with_class(code2wav_config(config), "code2wav")


def _with_class(config: Any, model_stage: str) -> Any:
    config.architectures = [CLASSES[model_stage]]
    return config


FAMILY = FailingFamily()
