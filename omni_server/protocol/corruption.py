"""How a stage reports a request whose data is corrupt. Only that request fails.

An autoregressive stage reports it as the `stop_reason` of a vLLM output that ends with an error, a diffusion
stage in place of its result (`omni_server.transport.result`). In both cases it is one line of text.
"""

from dataclasses import dataclass
from typing import Literal, get_args

CorruptionKind = Literal[
    "logits",  # NaN or infinity among a language model's scores
    "rows",  # NaN or infinity in the rows that one stage sends to another
    "row_sequence",  # rows missing, duplicated, out of order, of another shape, or no longer in their place
    "codes",  # codec tokens that the decoder has no embedding for
    "window_sequence",  # windows of codec tokens missing, duplicated or out of order
    "shape",  # a result that is not a waveform or image, or not of the requested size
    "samples",  # audio samples or pixels that are NaN, infinite, or beyond full scale
    "clipped",  # most samples at full scale
    "flat",  # all samples the same, where the codec tokens are not
]
CORRUPTION_KINDS: tuple[CorruptionKind, ...] = get_args(CorruptionKind)

_PREFIX = "omni_corrupt_data "


@dataclass(frozen=True)
class Corruption:
    """One finding, about one request."""

    kind: CorruptionKind
    detail: str
    """For the caller and the log."""


def encode_corruption(corruption: Corruption) -> str:
    return f"{_PREFIX}{corruption.kind} {corruption.detail}"


def decode_corruption(line: str) -> Corruption | None:
    """The inverse of `encode_corruption`; None for any other text."""
    if not line.startswith(_PREFIX):
        return None
    name, _, detail = line.removeprefix(_PREFIX).partition(" ")
    kind = next((kind for kind in CORRUPTION_KINDS if kind == name), None)
    return None if kind is None else Corruption(kind, detail)
