"""Text to speech without text output: a stage that samples four codebooks at 12.5 Hz and a 16 kHz decoder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.pipeline import EdgeSpec, Pipeline, StageSpec, TokenFrames
from omni_server.errors import ConfigError
from omni_server.family import HfOverrides
from omni_server.family.codec import CodecLayout, DecoderWindow, Frame
from stages.codec_chunking import ChunkedEdge, Window
from tests.toy_families.toy import END, ToyFamily, ToyModel, with_architecture

SPEAKER, VOCODER = "ToySpeaker", "ToyVocoder"
NUM_CODEBOOKS = 4
SAMPLE_RATE_HZ = 16_000
SAMPLES_PER_FRAME = 1280  # 12.5 Hz
FRAMES_PER_BLOCK = 2


class WindowInput(msgspec.Struct, frozen=True):
    """The decoder's input for one window of frames."""

    voice: str
    first_frame: int


class Windows(ChunkedEdge):
    """Implements `omni_server.family.codec.CodecEdge`. The decoder keeps no state and ignores context."""

    def __init__(
        self, plan: ChunkPlan, layout: CodecLayout, *, voice: str, noise_seed: int, past: Sequence[Frame] = ()
    ) -> None:
        if plan.carries_state:
            raise ConfigError("this decoder keeps no state: set chunks.carry to false")
        super().__init__(plan, layout.frames_per_block)
        self._voice = voice
        self._layout = layout

    def _request(self, window: Window[Frame]) -> DecoderWindow:
        frames = window.emitted
        return DecoderWindow(
            token_ids=tuple(token for frame in frames for token in frame),
            payload=msgspec.msgpack.encode(WindowInput(self._voice, window.emit_start)),
            first_sample=window.emit_start * self._layout.samples_per_frame,
            num_samples=len(frames) * self._layout.samples_per_frame,
            num_computed=len(frames),
            is_varied=len(set(frames)) > 1,
        )


class SpeechModel(ToyModel):
    voices: tuple[str, ...] = ("Low", "High")
    default_voice = "Low"
    stop_ids: Mapping[str, tuple[int, ...]] = {"speaker": (END,)}
    codec: CodecLayout | None = CodecLayout(FRAMES_PER_BLOCK, SAMPLES_PER_FRAME, SAMPLE_RATE_HZ)


class SpeechFamily(ToyFamily):
    pipeline = Pipeline(
        {"speaker": StageSpec("ar"), "vocoder": StageSpec("diffusion", output="audio")},
        (
            EdgeSpec(
                "speaker",
                "vocoder",
                TokenFrames(NUM_CODEBOOKS),
                "tests.toy_families.speech_only:Windows",
                ChunkPlan(carry=False, past_blocks=0, new_blocks=(1, 2), future_blocks=0),
            ),
        ),
    )
    architectures = (SPEAKER,)
    engine_modules = ("tests.toy_families.models",)

    def open(self, model_dir: Path) -> SpeechModel:
        return SpeechModel(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return vocoder_config if model_stage == "vocoder" else None

    def register(self) -> None:
        from vllm import ModelRegistry

        from tests.toy_families.models import ToySpeaker, ToyVocoder

        ModelRegistry.register_model(SPEAKER, ToySpeaker)
        ModelRegistry.register_model(VOCODER, ToyVocoder)


def vocoder_config(config: Any) -> Any:
    return with_architecture(config, VOCODER)


FAMILY = SpeechFamily()
