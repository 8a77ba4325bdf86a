"""What the orchestrator asks of an edge into code2wav, and how edge functions are found by name."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.errors import ConfigError
from omni_server.family import CodecLayout


@dataclass(frozen=True)
class Code2WavRequest:
    """One piece of work for code2wav; its result is the waveform from `first_sample` on."""

    token_ids: tuple[int, ...]
    payload: bytes
    """The stage's encoded input, see the model family's edge."""
    first_sample: int
    num_samples: int
    num_computed: int
    """Codec tokens that are computed, where code2wav has kept what came before: `token_ids` without those."""
    is_varied: bool
    """The codec tokens whose sound is asked for are not all the same."""


class CodecEdge(Protocol):
    """Turns the codec tokens of one utterance into code2wav requests, in order and without gaps."""

    def use_ramp(self, new_blocks: Sequence[int]) -> None:
        """Cut the utterance into windows of so many new blocks, instead of the plan's. Before the first request."""
        ...

    def push(self, codes: Sequence[int]) -> list[Code2WavRequest]:
        """New codes; the requests that have become complete."""
        ...

    def finish(self) -> list[Code2WavRequest]:
        """No further codes follow; the remaining requests."""
        ...


class CodecEdgeFactory(Protocol):
    """The edge function itself."""

    def __call__(self, plan: ChunkPlan, layout: CodecLayout, *, voice: str, noise_seed: int) -> CodecEdge:
        """Raises `ConfigError` if the plan does not fit the model."""
        ...


def check_longest_window(plan: ChunkPlan, layout: CodecLayout, max_model_len: int) -> None:
    """Raises `ConfigError` if the plan cuts windows that code2wav, which takes `max_model_len` codes, cannot hold.

    In mode `whole` that depends on the utterance.
    """
    if plan.longest_window_blocks is None:
        return
    num_codes = plan.longest_window_blocks * layout.codes_per_block
    if num_codes > max_model_len:
        raise ConfigError(
            f"the longest window of 'chunks' has {plan.longest_window_blocks} blocks, {num_codes} codec tokens; "
            f"code2wav's max_model_len is {max_model_len}: raise it, or lower the largest of new_blocks "
            "(busy.new_blocks included)"
        )


def load_edge_function(name: str) -> object:
    """`name` is `package.module:attribute`. Raises `ConfigError` if there is no such thing."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        raise ConfigError(f"edge function '{name}': cannot import {module_name} ({exc})") from exc
    if attribute not in vars(module):
        raise ConfigError(f"edge function '{name}': {module_name} has no '{attribute}'")
    return vars(module)[attribute]
