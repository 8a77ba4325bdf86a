"""Qwen2.5-Omni in the server process: prompts, voices, ids, but no weights and no engine."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from omni_server.config.checkpoint_files import config_errors, read_json_object
from omni_server.config.pipeline import EdgeSpec, Embeddings, Pipeline, StageSpec, TokenFrames
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError
from omni_server.family import (
    DefaultConfigs,
    EmbeddingsPrompt,
    NeededFile,
    PlaceholderIds,
    ReferenceImplementation,
)
from omni_server.family.footprint import StageFootprint
from omni_server.types import ChatMessage, FunctionTool, Output, Prompt, Task, TextPart, Transcribe
from stages.chat_prompts import PromptRenderer
from stages.qwen2_5_omni.ids import read_special_ids
from stages.qwen2_5_omni.options import Code2WavChunks, Code2WavStage
from stages.qwen2_5_omni.talker_to_code2wav import Code2WavLayout
from stages.qwen_omni.chats import QwenOmniModel
from stages.stage_models import DeclaresModels, modules_of

DEFAULT_VOICE = "Chelsie"
"""The reference's default `speaker` in `generate`."""

SPEECH_SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory "
    "and visual inputs, as well as generating text and speech."
)
"""The model card requires exactly this text for speech output."""

_DEFAULT_SYSTEM_PROMPT = "You are a helpful assistant."
"""The checkpoint's template inserts it if there is no system message."""

# The model authors' prompts for these tasks, from "Universal Audio Understanding" in the cookbooks of
# QwenLM/Qwen2.5-Omni. The originals ask for text without punctuation marks, to match their benchmarks.
_RECOGNITION_SYSTEM_PROMPT = "You are a speech recognition model."
_TRANSLATION_SYSTEM_PROMPT = "You are a speech translation model."

PIPELINE = Pipeline(
    stages={
        "thinker": StageSpec("ar", output="text"),
        "talker": StageSpec("ar"),
        "code2wav": StageSpec("diffusion", output="audio", config=Code2WavStage),
    },
    edges=(
        EdgeSpec("thinker", "talker", Embeddings(), "stages.qwen2_5_omni.thinker_to_talker:ThinkerToTalker"),
        EdgeSpec(
            "talker",
            "code2wav",
            TokenFrames(),
            "stages.qwen2_5_omni.talker_to_code2wav:TalkerToCode2Wav",
            Code2WavChunks(),
        ),
    ),
)


class Qwen25OmniFamily(DeclaresModels):
    """Implements `omni_server.family.ModelFamily`."""

    pipeline = PIPELINE

    architectures = ("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration")
    reference: ReferenceImplementation | None = ReferenceImplementation(
        "stages.qwen2_5_omni.reference:Qwen25OmniReference"
    )
    models: ClassVar[Mapping[str, str]] = {
        "thinker": "stages.qwen2_5_omni.thinker:Qwen2_5OmniThinker",
        "talker": "stages.qwen2_5_omni.talker:Qwen2_5OmniTalker",
        "code2wav": "stages.qwen2_5_omni.code2wav.model:Qwen2_5OmniCode2Wav",
    }
    configs = "stages.qwen2_5_omni.hf_overrides"
    engine_modules: tuple[str, ...] = modules_of(models)
    default_configs: DefaultConfigs | None = DefaultConfigs(
        gpu="qwen2_5_omni", cpu="qwen2_5_omni.cpu", demo="qwen2_5_omni.demo-cpu"
    )

    def open(self, model_dir: Path) -> "Qwen25OmniModel":
        return Qwen25OmniModel(model_dir)

    def needed_files(self) -> tuple[NeededFile, ...]:
        from stages.qwen2_5_omni.footprint import NEEDED_FILES

        return NEEDED_FILES

    def footprints(self, model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
        from stages.qwen2_5_omni.footprint import stage_footprints

        return stage_footprints(model_dir, config)

    def outputs(self, model_dir: Path) -> frozenset[Output]:
        return self.pipeline.outputs  # every release has a talker


class Qwen25OmniModel(QwenOmniModel):
    """One checkpoint folder. Its template does not support tools."""

    extra_rows_per_request = 3  # the voice's begin token, text end, text pad
    recognition_request = "Transcribe the {language} audio into text, in the language that is spoken."

    def __init__(self, model_dir: Path) -> None:
        from stages.qwen2_5_omni.code2wav.voices import load_voices

        self._ids = ids = read_special_ids(model_dir)
        path = model_dir / "config.json"
        config: dict[str, Any] = read_json_object(path)
        with config_errors(f"{path} describes no model that can be built"):
            self._dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
            self.row_width = int(config["talker_config"]["embedding_size"])
            dit = config["token2wav_config"]["dit_config"]
            rates = config["token2wav_config"]["bigvgan_config"]["upsample_rates"]
            self.codec = _codec_layout(int(dit["block_size"]), int(dit["repeats"]), rates)
        self.voices = tuple(load_voices(model_dir))
        self.default_voice = DEFAULT_VOICE if DEFAULT_VOICE in self.voices else self.voices[0]
        # The talker's ids are the reference's default `talker_eos_token_id` in `generate`.
        self.stop_ids = {"thinker": (ids.im_end,), "talker": (ids.codec_pad, ids.codec_end)}
        self.placeholder_ids = PlaceholderIds(
            ids.audio_placeholder, ids.image_placeholder, ids.video_placeholder
        )
        self._renderer = PromptRenderer(model_dir, tools_system_prompt=_DEFAULT_SYSTEM_PROMPT)

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        outputs: Collection[Output],
        tools: Sequence[FunctionTool] = (),
    ) -> Prompt:
        if "audio" in outputs and not any(message.role == "system" for message in messages):
            messages = (ChatMessage("system", (TextPart(SPEECH_SYSTEM_PROMPT),)), *messages)
        return super().prompt(messages, outputs=outputs, tools=tools)

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        messages = super().task_messages(task)
        if not isinstance(task, Transcribe):
            return messages  # `prompt` adds the system message for speech
        system = _TRANSLATION_SYSTEM_PROMPT if task.to_english else _RECOGNITION_SYSTEM_PROMPT
        return (ChatMessage("system", (TextPart(system),)), *messages)

    def embeddings_prompt(self, stage: str, source_ids: Sequence[int], *, voice: str) -> EmbeddingsPrompt:
        """Returns the ids that the reference passes to its logits processors, repetition penalty included.

        Rows replace the embeddings at the thinker's positions. At the last two positions, row and codec
        embedding are added.
        """
        ids, length = self._ids, len(source_ids)
        return EmbeddingsPrompt((ids.codec_mask,) * length + (ids.codec_pad, ids.codec_start), length)


def _codec_layout(block_size: int, repeats: int, upsample_rates: list[int]) -> Code2WavLayout:
    """Takes the DiT's `block_size` (mel frames) and `repeats` (mel frames per code), the vocoder's rates."""
    if block_size % repeats:
        raise ConfigError(f"block_size {block_size} is no multiple of repeats {repeats}")
    return Code2WavLayout(
        frames_per_block=block_size // repeats,
        samples_per_frame=repeats * math.prod(upsample_rates),
        mel_frames_per_code=repeats,
    )
