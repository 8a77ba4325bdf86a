"""Text and speech, where text reaches the speaker as ids. Each "*" of a prompt stands for media: its row
comes from the writer."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.pipeline import EdgeSpec, Embeddings, Pipeline, StageSpec, TokenFrames
from omni_server.family import MEDIA_ROW, EmbeddingsPrompt, HfOverrides, SourceSpan, TextRows
from tests.toy_families.branched import BEGIN, PAD, WRITER
from tests.toy_families.speech_only import NUM_CODEBOOKS, VOCODER, SpeechModel, vocoder_config
from tests.toy_families.toy import END, HIDDEN_SIZE, ToyFamily, with_architecture

SPELLER = "ToySpeller"
MEDIA = 9
"""The id of "*", as the tokenizer orders its letters."""
LAYER = 1
"""The writer's layer whose hidden states are rows."""


class SpelledModel(SpeechModel):
    stop_ids: Mapping[str, tuple[int, ...]] = {"writer": (END,), "speaker": (END,)}
    row_width = HIDDEN_SIZE

    def embeddings_prompt(
        self, stage: str, source_ids: Sequence[int], *, voice: str | None
    ) -> EmbeddingsPrompt:
        assert voice is not None
        spans: list[SourceSpan] = []
        first = 0
        for is_media, run in groupby(source_ids, lambda token: token == MEDIA):
            count = len(list(run))
            spans.append(SourceSpan(first, first, count, has_rows=is_media))
            first += count
        row_ids = (*(MEDIA_ROW if token == MEDIA else token for token in source_ids), ord(voice[0]))
        text = TextRows(row_ids, tuple(spans), (END,))
        return EmbeddingsPrompt((PAD,) * len(source_ids) + BEGIN, len(source_ids), text)


class SpelledFamily(ToyFamily):
    pipeline = Pipeline(
        {
            "writer": StageSpec("ar", output="text"),
            "speaker": StageSpec("ar"),
            "vocoder": StageSpec("diffusion", output="audio"),
        },
        (
            EdgeSpec("writer", "speaker", Embeddings(text_ids=True), "tests.toy_families.models:MiddleRows"),
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

    def open(self, model_dir: Path) -> SpelledModel:
        return SpelledModel(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        overrides: dict[str, HfOverrides] = {"speaker": speaker_config, "vocoder": vocoder_config}
        return overrides.get(model_stage)

    def register(self) -> None:
        from vllm import ModelRegistry
        from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

        from tests.toy_families.models import ToySpeller, ToyVocoder

        ModelRegistry.register_model(WRITER, Qwen2ForCausalLM)
        ModelRegistry.register_model(SPELLER, ToySpeller)
        ModelRegistry.register_model(VOCODER, ToyVocoder)


def speaker_config(config: object) -> object:
    return with_architecture(config, SPELLER)


FAMILY = SpelledFamily()
