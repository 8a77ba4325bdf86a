"""The talker -> code2wav edge: splits codec tokens into windows, with the voice and the noise seed."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.errors import ConfigError
from omni_server.family import CodecLayout, DecoderWindow, Frame
from stages.codec_chunking import CodecChunker, Window
from stages.qwen2_5_omni.codec_window import CodecWindow
from stages.qwen2_5_omni.options import Code2WavChunks


@dataclass(frozen=True, kw_only=True)
class Code2WavLayout(CodecLayout):
    mel_frames_per_code: int
    """`repeats` of the DiT's config: mel frames per codec token."""


class TalkerToCode2Wav:
    """Implements `omni_server.family.CodecEdge` for one stream. A frame is one codec token."""

    def __init__(
        self, plan: ChunkPlan, layout: CodecLayout, *, voice: str, noise_seed: int, past: Sequence[Frame] = ()
    ) -> None:
        assert isinstance(plan, Code2WavChunks)
        assert isinstance(layout, Code2WavLayout)
        check_margin(plan, layout)
        self._plan = plan
        self._layout = layout
        self._voice = voice
        self._noise_seed = noise_seed
        self._chunker = CodecChunker[int](plan, layout.frames_per_block)
        # Not the request's id: a client may reuse it while code2wav still has a window of the first use.
        self._stream = uuid.uuid4().hex if plan.carries_state else None

    def use_ramp(self, new_blocks: Sequence[int]) -> None:
        self._chunker.use_ramp(new_blocks)

    def push(self, frames: Sequence[Frame]) -> list[DecoderWindow]:
        return self._requests(self._chunker.push(code for (code,) in frames))

    def flush(self) -> list[DecoderWindow]:
        return self._requests(self._chunker.flush())

    def finish(self) -> list[DecoderWindow]:
        return self._requests(self._chunker.finish())

    def _requests(self, windows: Sequence[Window[int]]) -> list[DecoderWindow]:
        return [self._request(window) for window in windows]

    def _request(self, window: Window[int]) -> DecoderWindow:
        num_samples = self._layout.samples_per_frame
        told = codec_window(
            window, self._plan, voice=self._voice, noise_seed=self._noise_seed, stream=self._stream
        )
        return DecoderWindow(
            token_ids=window.frames,
            payload=told.encode(),
            first_sample=window.emit_start * num_samples,
            num_samples=len(window.emitted) * num_samples,
            num_computed=len(window.frames)
            - (0 if self._stream is None else window.emit_start - window.first_frame),
            is_varied=len(set(window.emitted)) > 1,
        )


def codec_window(
    window: Window[int], plan: Code2WavChunks, *, voice: str, noise_seed: int, stream: str | None = None
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
