"""The families with stages that fail when they are told to. Named by the stage configs of these tests
alone."""

from pathlib import Path
from typing import Any

from omni_server.family import HfOverrides
from stages.qwen2_5_omni import hf_overrides as qwen25
from stages.qwen2_5_omni.family import Qwen25OmniFamily, Qwen25OmniModel
from stages.qwen3_omni import hf_overrides as qwen3
from stages.qwen3_omni.family import Qwen3OmniFamily, Qwen3OmniModel
from tests.faults.task_count import answer_signals

QWEN25_CLASSES = ("FailingQwen25Thinker", "FailingQwen25Talker", "FailingQwen25Code2Wav")
QWEN3_CLASSES = ("FailingQwen3Thinker", "FailingQwen3Talker", "FailingQwen3Code2Wav")


class FailingQwen25(Qwen25OmniFamily):
    engine_modules = (*Qwen25OmniFamily.engine_modules, "tests.faults.failing_models")

    def open(self, model_dir: Path) -> Qwen25OmniModel:
        answer_signals()
        return super().open(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return {
            "thinker": failing_qwen25_thinker,
            "talker": failing_qwen25_talker,
            "code2wav": failing_qwen25_code2wav,
        }[model_stage]

    def register(self) -> None:
        super().register()
        register_failing_models()


class FailingQwen3(Qwen3OmniFamily):
    engine_modules = (*Qwen3OmniFamily.engine_modules, "tests.faults.failing_models")

    def open(self, model_dir: Path) -> Qwen3OmniModel:
        answer_signals()
        return super().open(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return {
            "thinker": failing_qwen3_thinker,
            "talker": failing_qwen3_talker,
            "code2wav": failing_qwen3_code2wav,
        }[model_stage]

    def register(self) -> None:
        super().register()
        register_failing_models()


def register_failing_models() -> None:
    from vllm import ModelRegistry

    from tests.faults import failing_models

    for name in (*QWEN25_CLASSES, *QWEN3_CLASSES):
        ModelRegistry.register_model(name, vars(failing_models)[name])


# Functions of a module, as vLLM sends them to the engines by their names.


def failing_qwen25_thinker(config: Any) -> Any:
    return _with_class(config, QWEN25_CLASSES[0])


def failing_qwen25_talker(config: Any) -> Any:
    return _with_class(qwen25.talker_config(config), QWEN25_CLASSES[1])


def failing_qwen25_code2wav(config: Any) -> Any:
    return _with_class(qwen25.code2wav_config(config), QWEN25_CLASSES[2])


def failing_qwen3_thinker(config: Any) -> Any:
    return _with_class(qwen3.thinker_config(config), QWEN3_CLASSES[0])


def failing_qwen3_talker(config: Any) -> Any:
    return _with_class(qwen3.talker_config(config), QWEN3_CLASSES[1])


def failing_qwen3_code2wav(config: Any) -> Any:
    return _with_class(qwen3.code2wav_config(config), QWEN3_CLASSES[2])


def _with_class(config: Any, name: str) -> Any:
    config.architectures = [name]
    return config


qwen2_5_omni = FailingQwen25()
qwen3_omni = FailingQwen3()
