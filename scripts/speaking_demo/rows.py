"""The rows that the thinker passes to the talker: frozen embeddings plus a little of its state."""

from functools import cache

import torch

from scripts.speaking_demo import vocabulary

WIDTH = 128
STATE_GAIN = 0.1
"""Weight of the thinker's final norm. A row is embedding plus state, and the state is noise to the talker."""
_FORM_SIZE = 0.4


@cache
def unit_of_token() -> tuple[str, ...]:
    """The unit of every plain token, by id."""
    units = [vocabulary.unit_of_byte(value) for value in range(256)]
    return (*units, *vocabulary.tokens().values())


@cache
def tokens_of_unit() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for token, unit in enumerate(unit_of_token()):
        found[unit] = (*found.get(unit, ()), token)
    return found


def embeddings(vocab_size: int) -> torch.Tensor:
    """Float32 [vocab_size, WIDTH]. All tokens of a unit share a vector, plus a small one per written form, so
    the talker treats a word alike with and without its space or capital."""
    generator = torch.Generator().manual_seed(7)
    units = vocabulary.units()
    of_unit = dict(zip(units, torch.randn(len(units), WIDTH, generator=generator), strict=True))
    table = torch.randn(vocab_size, WIDTH, generator=generator)
    forms = _FORM_SIZE * torch.randn(8, WIDTH, generator=generator)
    for unit, tokens in tokens_of_unit().items():
        for form, token in enumerate(tokens):
            table[token] = of_unit[unit] + (forms[form] if form < len(forms) else _FORM_SIZE * table[token])
    return table
