"""What an edge that carries codec tokens needs before the engines start: its function, and room for its
longest window."""

from typing import cast

from omni_server.config.pipeline import imported
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError
from omni_server.family import FamilyModel
from omni_server.family.codec import CodecEdgeFactory


def check_longest_window(config: StageConfig, model: FamilyModel) -> None:
    """Raises `ConfigError` if the longest window exceeds the decoder's `max_model_len` tokens.

    In mode `whole` it depends on the stream.
    """
    edge = config.speech_edge
    num_blocks = None if edge is None or edge.chunks is None else edge.chunks.longest_window_blocks
    if edge is None or num_blocks is None or model.codec is None:
        return
    num_tokens = num_blocks * model.codec.frames_per_block * config.frames.num_codebooks
    limit = config.stages[edge.target].max_model_len
    if num_tokens > limit:
        raise ConfigError(
            f"the longest window of 'chunks' has {num_blocks} blocks, {num_tokens} codec tokens; "
            f"max_model_len of {edge.target} is {limit}: raise it, or lower the largest of new_blocks "
            "(busy.new_blocks included)"
        )


def load_edge_function(name: str) -> CodecEdgeFactory:
    """`name` is `package.module:attribute`. Raises `ConfigError` if it does not exist."""
    try:
        return cast(CodecEdgeFactory, imported(name))
    except ValueError as error:
        raise ConfigError(f"edge function '{name}': {error}") from error
