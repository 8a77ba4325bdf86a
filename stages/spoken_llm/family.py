"""A language model and the Qwen3-TTS checkpoint that reads its answers aloud, in the server process."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omni_server.config.checkpoint_files import read_json_object
from omni_server.config.pipeline import EdgeSpec, Pipeline, StageSpec, Text
from omni_server.config.speech_model import LLM_FOLDER, SPEECH_FOLDER, SPOKEN_LLM
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError
from omni_server.family import (
    DefaultConfigs,
    HfOverrides,
    NeededFile,
    PlaceholderIds,
    ReferenceImplementation,
)
from omni_server.family.footprint import StageFootprint
from omni_server.types import ChatMessage, FunctionTool, Output, Prompt
from stages.chat_prompts import PromptRenderer
from stages.qwen3_tts.family import PIPELINE as SPEECH_PIPELINE
from stages.qwen3_tts.family import Qwen3TTSFamily, Qwen3TTSModel

THINKER = "thinker"

PIPELINE = Pipeline(
    stages={
        THINKER: StageSpec("ar", output="text", folder=LLM_FOLDER),
        **{
            name: replace(spec, folder=str(Path(SPEECH_FOLDER, spec.folder or "")))
            for name, spec in SPEECH_PIPELINE.stages.items()
        },
    },
    edges=(
        EdgeSpec(THINKER, "talker", Text(), "stages.spoken_llm.spoken_text_filter:SpokenTextFilter"),
        *SPEECH_PIPELINE.edges,
    ),
)


class SpokenLLMFamily(Qwen3TTSFamily):
    """Implements `omni_server.family.ModelFamily`. The thinker is vLLM's, as it is."""

    pipeline = PIPELINE

    architectures = (SPOKEN_LLM,)
    reference: ReferenceImplementation | None = None
    default_configs: DefaultConfigs | None = DefaultConfigs(gpu="spoken_llm", demo="spoken_llm.demo-cpu")

    def open(self, model_dir: Path) -> "SpokenLLMModel":
        return SpokenLLMModel(model_dir)

    def needed_files(self) -> tuple[NeededFile, ...]:
        llm = NeededFile(("tokenizer.json", "tokenizer.model", "vocab.json"), "the tokenizer")
        files = {LLM_FOLDER: (llm,), SPEECH_FOLDER: super().needed_files()}
        return tuple(
            replace(needed, names=tuple(f"{folder}/{name}" for name in needed.names))
            for folder, needed_files in files.items()
            for needed in needed_files
        )

    def footprints(self, model_dir: Path, config: StageConfig) -> dict[str, StageFootprint]:
        from stages.spoken_llm.footprint import stage_footprints

        return stage_footprints(model_dir, config)

    def outputs(self, model_dir: Path) -> frozenset[Output]:
        return super().outputs(model_dir / SPEECH_FOLDER)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return None if model_stage == THINKER else super().hf_overrides(model_stage)


class SpokenLLMModel(Qwen3TTSModel):
    """The voice is that of Qwen3-TTS; the chat is that of the language model."""

    def __init__(self, model_dir: Path) -> None:
        """Raises `ConfigError` if the language model has no chat template or no end token."""
        super().__init__(model_dir / SPEECH_FOLDER)
        folder = model_dir / LLM_FOLDER
        config = read_json_object(folder / "config.json")
        self._dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        self._renderer = PromptRenderer(folder, tools_system_prompt=None)
        self.stop_ids = {**self.stop_ids, THINKER: _stop_ids(folder, config)}
        self.input_modalities = self._renderer.input_modalities
        if self.input_modalities:
            self.placeholder_ids = PlaceholderIds(
                None, *(_token_id(config, f"{kind}_token") for kind in ("image", "video"))
            )

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        outputs: Collection[Output],
        tools: Sequence[FunctionTool] = (),
    ) -> Prompt:
        return self._renderer.render(messages, tools=tools)

    def dtype_name(self) -> str:
        return self._dtype


def _token_id(config: Mapping[str, object], name: str) -> int | None:
    token_id = config.get(f"{name}_id", config.get(f"{name}_index"))
    return token_id if isinstance(token_id, int) else None


def _stop_ids(folder: Path, config: Mapping[str, object]) -> tuple[int, ...]:
    """Those of generation_config.json, or else of `config`."""
    path = folder / "generation_config.json"
    generation = read_json_object(path) if path.is_file() else {}
    named = (part.get("eos_token_id") for part in (generation, config))
    ids = next((ids for ids in named if ids is not None), None)
    if not isinstance(ids, int | list) or ids == []:
        raise ConfigError(f"{folder}: neither generation_config.json nor config.json names an eos_token_id")
    return tuple(map(int, ids)) if isinstance(ids, list) else (ids,)
