"""Text only: one stage, vLLM's own model."""

from collections.abc import Mapping
from pathlib import Path

from omni_server.config.pipeline import Pipeline, StageSpec
from omni_server.family import HfOverrides
from tests.toy_families.toy import END, ToyFamily, ToyModel

ARCHITECTURE = "Qwen2ForCausalLM"


class TextModel(ToyModel):
    stop_ids: Mapping[str, tuple[int, ...]] = {"writer": (END,)}


class TextFamily(ToyFamily):
    pipeline = Pipeline({"writer": StageSpec("ar", output="text")})
    architectures = (ARCHITECTURE,)

    def open(self, model_dir: Path) -> TextModel:
        return TextModel(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return None

    def register(self) -> None:
        """vLLM has the model."""


FAMILY = TextFamily()
