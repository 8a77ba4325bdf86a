"""The talker -> code2wav edge: splits codec frames into windows, and keeps the stream's latest frames, from
which code2wav can compute a lost state again."""

from collections import deque
from collections.abc import Sequence

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.pipeline import EdgeSpec, TokenFrames
from omni_server.errors import ConfigError
from omni_server.family.codec import CodecLayout, DecoderWindow, Frame
from stages.codec_chunking import ChunkedEdge, Window
from stages.qwen_codec.codec_layout import NUM_CODEBOOKS, Code2WavLayout
from stages.qwen_codec.codec_window import CodecWindow, encode_frame

CODEC_EDGE = EdgeSpec(
    "talker",
    "code2wav",
    TokenFrames(num_codebooks=NUM_CODEBOOKS, num_predicted=NUM_CODEBOOKS - 1),
    f"{__name__}:TalkerToCode2Wav",
    # The decoder's state holds all of the past, and the future has no influence.
    ChunkPlan(past_blocks=0, new_blocks=(1, 2, 4, 8), future_blocks=0),
)


class TalkerToCode2Wav(ChunkedEdge):
    """The voice is in the codes already, and the decoder draws no noise."""

    def __init__(
        self, plan: ChunkPlan, layout: CodecLayout, *, voice: str, noise_seed: int, past: Sequence[Frame] = ()
    ) -> None:
        assert isinstance(layout, Code2WavLayout)
        check_plan(plan)
        super().__init__(plan, layout.frames_per_block)
        self._layout = layout
        self._num_past = len(past)
        self._past = deque(map(encode_frame, past), maxlen=layout.context_frames)

    def _request(self, window: Window[Frame]) -> DecoderWindow:
        frames, layout = window.frames, self._layout
        first_frame = self._num_past + window.first_frame
        told = CodecWindow(
            self._stream,
            first_frame,
            window.is_last,
            b"".join(self._past),
            is_first=window.first_frame == 0,
        )
        self._past.extend(map(encode_frame, frames))
        first_sample = layout.first_sample(window.first_frame)
        return DecoderWindow(
            token_ids=tuple(code for frame in frames for code in frame),
            payload=told.encode(),
            first_sample=first_sample,
            num_samples=layout.first_sample(window.first_frame + len(frames)) - first_sample,
            num_computed=len(frames),
            is_varied=len(set(frames)) > 1,
        )


def check_plan(plan: ChunkPlan) -> None:
    """Raises `ConfigError` for context around the new frames: the state holds all of the past, and the future
    has no influence."""
    if plan.mode == "whole":
        return
    if not plan.carry:
        raise ConfigError("chunks.carry is false, but this decoder needs the state: set it to true")
    for name, blocks in (("past_blocks", plan.past_blocks), ("future_blocks", plan.future_blocks)):
        if blocks:
            raise ConfigError(f"chunks.{name} is {blocks}, but this decoder uses none: set it to 0")
