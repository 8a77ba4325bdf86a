"""The family of folders that hold a Diffusers pipeline and, in `thinker/`, a text model of vLLM's.

Both engines are of this one family: the pipeline's part is that of `stages.diffusers`, and vLLM runs the text
model as it is.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from omni_server.config.pipeline import EdgeSpec, Pipeline, StageSpec, Text
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import CommonStage
from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.family import DefaultConfigs, HfOverrides, NeededFile, Prompt, StageFootprint
from omni_server.images import ImageFeatures
from omni_server.types import ChatMessage, FunctionTool, Output, Task
from stages.chain.text_model import TextModel
from stages.diffusers import FAMILY as DIFFUSERS
from stages.diffusers.family import DiffusersModel

THINKER, IMAGE = "thinker", "image"
FOLDER = "thinker"
"""Of the text model, beside the folders of the pipeline's components."""


class ChainFamily:
    """Implements `omni_server.family.ModelFamily`."""

    pipeline = Pipeline(
        {
            THINKER: StageSpec("ar", output="text", folder=FOLDER),
            IMAGE: DIFFUSERS.pipeline.stages["image"],
        },
        (EdgeSpec(THINKER, IMAGE, Text(), "stages.chain.image_prompt:image_prompt"),),
    )
    architectures = DIFFUSERS.architectures
    reference: str | None = None
    engine_modules = DIFFUSERS.engine_modules
    default_configs: DefaultConfigs | None = None

    def open(self, model_dir: Path) -> "ChainModel":
        return ChainModel(model_dir)

    def needed_files(self) -> tuple[NeededFile, ...]:
        return (
            *DIFFUSERS.needed_files(),
            NeededFile((f"{FOLDER}/config.json",), "the text model"),
            NeededFile((f"{FOLDER}/tokenizer_config.json",), "the text model's tokenizer"),
        )

    def footprints(self, model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
        from stages.chain.footprint import text_model_footprint

        thinkers = {
            name: text_model_footprint(model_dir, FOLDER)
            for name, stage in config.stages.items()
            if stage.model_stage == THINKER
        }
        return thinkers | DIFFUSERS.footprints(model_dir, config)

    def outputs(self, model_dir: Path) -> frozenset[Output]:
        return self.pipeline.outputs

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return None

    def register(self) -> None:
        DIFFUSERS.register()


class ChainModel(DiffusersModel):
    """One folder."""

    def __init__(self, model_dir: Path) -> None:
        """Raises `ConfigError` if the pipeline or the text model is unsuitable."""
        super().__init__(model_dir)
        if self._needs_image:
            raise ConfigError(f"{model_dir}: the pipeline only edits images, and a text model sends it none")
        self._text_model = TextModel(model_dir / FOLDER)
        self.stop_ids = {THINKER: self._text_model.stop_ids}

    def image_features(self, stage: CommonStage) -> ImageFeatures:
        return replace(super().image_features(stage), max_input_images=0)

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        outputs: Collection[Output],
        tools: Sequence[FunctionTool] = (),
    ) -> Prompt:
        return self._text_model.prompt(messages, for_image="image" in outputs, tools=tools)

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        raise InvalidRequestError("this model only writes text and generates images")
