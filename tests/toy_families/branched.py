"""Three stages with a branch: text, and speech from a speaker and a vocoder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.pipeline import EdgeSpec, Embeddings, Pipeline, StageSpec, TokenFrames
from omni_server.family import EmbeddingsPrompt, HfOverrides
from tests.toy_families.speech_only import NUM_CODEBOOKS, SPEAKER, VOCODER, SpeechModel
from tests.toy_families.toy import END, FIRST_CODE, HIDDEN_SIZE, ToyFamily, with_architecture

WRITER = "ToyWriter"
PAD, BEGIN = FIRST_CODE, (FIRST_CODE + 1, FIRST_CODE + 2)
"""Token ids of the speaker's prompt: one per writer position, then two more."""


class BranchedModel(SpeechModel):
    stop_ids: Mapping[str, tuple[int, ...]] = {"writer": (END,), "speaker": (END,)}
    row_width = HIDDEN_SIZE
    extra_rows_per_request = 2  # the voice's row and the one after the text

    def embeddings_prompt(self, stage: str, source_ids: Sequence[int], *, voice: str) -> EmbeddingsPrompt:
        return EmbeddingsPrompt((PAD,) * len(source_ids) + BEGIN, len(source_ids))


class BranchedFamily(ToyFamily):
    pipeline = Pipeline(
        {
            "writer": StageSpec("ar", output="text"),
            "speaker": StageSpec("ar"),
            "vocoder": StageSpec("diffusion", output="audio"),
        },
        (
            EdgeSpec("writer", "speaker", Embeddings(), "tests.toy_families.models:WriterRows"),
            EdgeSpec(
                "speaker",
                "vocoder",
                TokenFrames(NUM_CODEBOOKS),
                "tests.toy_families.speech_only:Windows",
                ChunkPlan(carry=False, past_blocks=0, new_blocks=(1, 2), future_blocks=0),
            ),
        ),
    )
    architectures = (WRITER,)
    engine_modules = ("tests.toy_families.models",)

    def open(self, model_dir: Path) -> BranchedModel:
        return BranchedModel(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        overrides: dict[str, HfOverrides] = {"speaker": speaker_config, "vocoder": vocoder_config}
        return overrides.get(model_stage)

    def register(self) -> None:
        from vllm import ModelRegistry
        from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

        from tests.toy_families.models import ToySpeaker, ToyVocoder

        ModelRegistry.register_model(WRITER, Qwen2ForCausalLM)
        ModelRegistry.register_model(SPEAKER, ToySpeaker)
        ModelRegistry.register_model(VOCODER, ToyVocoder)


def speaker_config(config: Any) -> Any:
    return with_architecture(config, SPEAKER)


def vocoder_config(config: Any) -> Any:
    return with_architecture(config, VOCODER)


FAMILY = BranchedFamily()
