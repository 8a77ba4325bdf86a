"""Requests whose token is sampled and thrown away: their prompts are not computed to the end yet."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def generators_set_aside(generators: dict[int, torch.Generator], rows: Sequence[int]) -> Iterator[None]:
    """While the block lasts, `generators` (by row of the batch, as vLLM's input batch has them) lack those of `rows`.

    vLLM's V1 runner samples for all rows and winds the generators of discarded ones back by their offset, which
    generators on a CPU do not have: the engine would end with a RuntimeError, and every request of the stage with it.
    Without its generator a row is sampled from the default one. A seed then gives the same tokens however its prompt
    is cut.
    """
    aside = {row: generators.pop(row) for row in rows if row in generators}
    try:
        yield
    finally:
        generators.update(aside)
