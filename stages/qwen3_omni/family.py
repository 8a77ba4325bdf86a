"""Qwen3-Omni in the server process: prompts, voices, ids, but no weights and no engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from omni_server.config.checkpoint_files import config_errors, read_json_object
from omni_server.config.pipeline import EdgeSpec, Embeddings, Pipeline, StageSpec
from omni_server.config.stage_config import StageConfig
from omni_server.family import (
    DefaultConfigs,
    EmbeddingsPrompt,
    NeededFile,
    PlaceholderIds,
    ReferenceImplementation,
)
from omni_server.family.footprint import StageFootprint
from omni_server.types import Output
from stages.chat_prompts import PromptRenderer
from stages.qwen3_omni.ids import read_special_ids
from stages.qwen3_omni.talker_prompt import talker_prompt
from stages.qwen_codec.codec_layout import check_num_codebooks, code2wav_layout
from stages.qwen_codec.options import Code2WavStage
from stages.qwen_codec.talker_to_code2wav import CODEC_EDGE
from stages.qwen_omni.chats import QwenOmniModel
from stages.stage_models import DeclaresModels, modules_of

DEFAULT_VOICE = "Ethan"
"""The reference's default `speaker` in `generate`."""

PIPELINE = Pipeline(
    stages={
        "thinker": StageSpec("ar", output="text"),
        "talker": StageSpec("ar"),
        "code2wav": StageSpec("diffusion", output="audio", config=Code2WavStage),
    },
    edges=(
        EdgeSpec(
            "thinker",
            "talker",
            Embeddings(text_ids=True),
            "stages.qwen3_omni.thinker_to_talker:ThinkerToTalker",
        ),
        CODEC_EDGE,
    ),
)


class Qwen3OmniFamily(DeclaresModels):
    """Implements `omni_server.family.ModelFamily`."""

    pipeline = PIPELINE

    architectures = ("Qwen3OmniMoeForConditionalGeneration",)
    reference: ReferenceImplementation | None = ReferenceImplementation(
        "stages.qwen3_omni.reference:Qwen3OmniReference"
    )
    models: ClassVar[Mapping[str, str]] = {
        "thinker": "stages.qwen3_omni.thinker:Qwen3OmniThinker",
        "talker": "stages.qwen3_omni.talker:Qwen3OmniTalker",
        "code2wav": "stages.qwen3_omni.code2wav:Qwen3OmniCode2Wav",
    }
    configs = "stages.qwen3_omni.hf_overrides"
    engine_modules: tuple[str, ...] = modules_of(models)
    default_configs: DefaultConfigs | None = DefaultConfigs(gpu="qwen3_omni", demo="qwen3_omni.demo-cpu")

    def open(self, model_dir: Path) -> "Qwen3OmniModel":
        return Qwen3OmniModel(model_dir)

    def needed_files(self) -> tuple[NeededFile, ...]:
        from stages.checkpoint_footprint import NEEDED_FILES

        return NEEDED_FILES

    def footprints(self, model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
        from stages.qwen3_omni.footprint import stage_footprints

        return stage_footprints(model_dir, config)

    def outputs(self, model_dir: Path) -> frozenset[Output]:
        has_talker = read_special_ids(model_dir).speech is not None
        return self.pipeline.outputs if has_talker else frozenset({"text"})


class Qwen3OmniModel(QwenOmniModel):
    """One checkpoint folder.

    Checkpoints without a talker (`enable_audio_output` is false, as in the Thinking and Captioner releases)
    have neither voices nor a codec.

    The checkpoint's template adds no system message, and speech needs none. The authors' model card
    recommends one for voice chats, which limits answers to 50 spoken words; callers who want that can send
    it. The template can write tools, but then takes the system message as plain text only, so
    `PromptRenderer` writes them, in the same words."""

    # From the evaluation section of the model card: no system message, and the audio before the text. There,
    # the language is always given.
    recognition_request = "Transcribe the {language} audio into text."

    def __init__(self, model_dir: Path) -> None:
        self._ids = ids = read_special_ids(model_dir)
        path = model_dir / "config.json"
        config: dict[str, Any] = read_json_object(path)
        with config_errors(f"{path} describes no model that can be built"):
            self._dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
            if ids.speech is not None:
                self.row_width = int(config["talker_config"]["text_config"]["hidden_size"])
                decoder = config["code2wav_config"]
                check_num_codebooks("code2wav_config.num_quantizers", decoder["num_quantizers"])
                self.codec = code2wav_layout(decoder)
        speakers = {} if ids.speech is None else ids.speech.speakers
        # The reference compares names in lower case, as they are in the published config.
        self._speakers = {name.capitalize(): name for name in speakers}
        self.voices = tuple(self._speakers)
        self.default_voice = DEFAULT_VOICE if DEFAULT_VOICE in self.voices else next(iter(self.voices), None)
        of_talker = {} if ids.speech is None else {"talker": (ids.speech.codec_eos,)}
        self.stop_ids = {"thinker": (ids.im_end,)} | of_talker
        self.placeholder_ids = PlaceholderIds(
            ids.audio_placeholder, ids.image_placeholder, ids.video_placeholder
        )
        self._renderer = PromptRenderer(model_dir, tools_system_prompt=None)

    def embeddings_prompt(self, stage: str, source_ids: Sequence[int], *, voice: str) -> EmbeddingsPrompt:
        """See `talker_prompt`."""
        return talker_prompt(self._ids, source_ids, self._speakers[voice])
