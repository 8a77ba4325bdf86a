"""vLLM's renderer, which an engine's client uses to tokenise prompts and to preprocess media.

vLLM makes one with each client. It copies the tokenizer several times, and holds Python's lock meanwhile:
every stream of the server would stand still when an engine is restarted. So the renderer of an engine that
has ended serves its successor."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from vllm.config import VllmConfig
from vllm.renderers import BaseRenderer
from vllm.renderers.hf import HfRenderer
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.tokenizers.hf import HfTokenizer

_kept: ContextVar[BaseRenderer[Any] | None] = ContextVar("kept", default=None)


class KeptRenderer(HfRenderer):
    """Outlives the clients that it serves: its threads end with the last reference to it."""

    def shutdown(self) -> None:
        """Called by a client that ends."""


def _renderer(config: VllmConfig, tokenizer: HfTokenizer | None) -> BaseRenderer[Any]:
    """Called by the constructor of a client."""
    return _kept.get() or KeptRenderer(config, tokenizer)


RENDERER_REGISTRY.register("hf", __name__, _renderer.__name__)


@contextmanager
def kept_renderer(renderer: BaseRenderer[Any] | None) -> Iterator[None]:
    """A client that is made in the block, in this thread, uses `renderer`; with None, it makes its own."""
    token = _kept.set(renderer)
    try:
        yield
    finally:
        _kept.reset(token)
