"""The interface of edges that carry codec tokens, and the lookup of edge functions by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.pipeline import Tensor, imported
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError
from omni_server.family import CodecLayout, FamilyModel


@dataclass(frozen=True)
class DecoderWindow:
    """One piece of work for the codec decoder; the result is the waveform from `first_sample` on."""

    token_ids: tuple[int, ...]
    """The frames of the window, concatenated."""
    payload: bytes
    """The stage's encoded input; see the family's edge."""
    first_sample: int
    num_samples: int
    num_computed: int
    """Frames to compute if the decoder has kept the state of earlier frames."""
    is_varied: bool
    """The frames whose audio is requested are not all equal."""


Frame = tuple[int, ...]
"""The codec tokens of one frame, one per codebook."""


class CodecEdge(Protocol):
    """Cuts the codec tokens of one speech stream into contiguous windows, in order."""

    def use_ramp(self, new_blocks: Sequence[int]) -> None:
        """Replace the plan's numbers of new blocks per window. Call it before the first window."""
        ...

    def push(self, frames: Sequence[Frame]) -> list[DecoderWindow]:
        """Adds frames; returns the windows now complete."""
        ...

    def finish(self) -> list[DecoderWindow]:
        """Ends the stream; returns the remaining windows."""
        ...


class CodecEdgeFactory(Protocol):
    """The edge function itself."""

    def __call__(self, plan: ChunkPlan, layout: CodecLayout, *, voice: str, noise_seed: int) -> CodecEdge:
        """Raises `ConfigError` if the plan does not fit the model."""
        ...


def check_longest_window(config: StageConfig, model: FamilyModel) -> None:
    """Raises `ConfigError` if the longest window exceeds the `max_model_len` tokens of a decoder's stage.

    In mode `whole` it depends on the stream.
    """
    edge = config.speech_edge
    num_blocks = None if edge is None or edge.chunks is None else edge.chunks.longest_window_blocks
    if num_blocks is None or model.codec is None:
        return
    num_tokens = num_blocks * model.codec.frames_per_block * config.num_codebooks
    while edge is not None:
        limit = config.stages[edge.target].max_model_len
        if num_tokens > limit:
            raise ConfigError(
                f"the longest window of 'chunks' has {num_blocks} blocks, {num_tokens} codec tokens; "
                f"max_model_len of {edge.target} is {limit}: raise it, or lower the largest of new_blocks "
                "(busy.new_blocks included)"
            )
        edge = config.edge_from(edge.target, Tensor)


def load_edge_function(name: str) -> object:
    """`name` is `package.module:attribute`. Raises `ConfigError` if it does not exist."""
    try:
        return imported(name)
    except ValueError as error:
        raise ConfigError(f"edge function '{name}': {error}") from error
