"""The talker -> code2wav edge: splits codec tokens into windows, with the voice and the noise seed."""

from collections.abc import Sequence
from dataclasses import dataclass

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.errors import ConfigError
from omni_server.family.codec import CodecLayout, DecoderWindow, Frame
from stages.codec_chunking import ChunkedEdge, F, Window
from stages.qwen2_5_omni.codec_window import CodecWindow
from stages.qwen2_5_omni.options import Code2WavChunks


@dataclass(frozen=True, kw_only=True)
class Code2WavLayout(CodecLayout):
    mel_frames_per_code: int
    """`repeats` of the DiT's config: mel frames per codec token."""


class TalkerToCode2Wav(ChunkedEdge):
    """A frame is one codec token."""

    def __init__(
        self, plan: ChunkPlan, layout: CodecLayout, *, voice: str, noise_seed: int, past: Sequence[Frame] = ()
    ) -> None:
        assert isinstance(plan, Code2WavChunks)
        assert isinstance(layout, Code2WavLayout)
        check_margin(plan, layout)
        super().__init__(plan, layout.frames_per_block)
        self._plan = plan
        self._layout = layout
        self._voice = voice
        self._noise_seed = noise_seed

    def _request(self, window: Window[Frame]) -> DecoderWindow:
        num_samples = self._layout.samples_per_frame
        stream = self._stream if self._plan.carries_state else None
        told = codec_window(window, self._plan, voice=self._voice, noise_seed=self._noise_seed, stream=stream)
        return DecoderWindow(
            token_ids=tuple(code for (code,) in window.frames),
            payload=told.encode(),
            first_sample=window.emit_start * num_samples,
            num_samples=len(window.emitted) * num_samples,
            num_computed=len(window.frames)
            - (0 if stream is None else window.emit_start - window.first_frame),
            is_varied=len(set(window.emitted)) > 1,
        )


def codec_window(
    window: Window[F], plan: Code2WavChunks, *, voice: str, noise_seed: int, stream: str | None = None
) -> CodecWindow:
    """The metadata of `window` for code2wav."""
    return CodecWindow(
        voice=voice,
        noise_seed=noise_seed,
        first_code=window.first_frame,
        emit_start=window.emit_start,
        emit_end=window.emit_end,
        vocoder_margin_frames=plan.vocoder_margin_frames,
        is_last=window.is_last,
        stream=stream,
    )


def check_margin(plan: Code2WavChunks, layout: Code2WavLayout) -> None:
    """Raises `ConfigError` if the plan's windows cannot give the vocoder its margin."""
    if plan.mode == "whole":
        return
    for name, blocks in (("past_blocks", plan.past_blocks), ("future_blocks", plan.future_blocks)):
        frames = blocks * layout.frames_per_block * layout.mel_frames_per_code
        if frames < plan.vocoder_margin_frames:
            raise ConfigError(
                f"chunks.{name} = {blocks} gives the vocoder {frames} mel frames of context, "
                f"vocoder_margin_frames asks for {plan.vocoder_margin_frames}: raise {name} or lower the "
                "margin"
            )
