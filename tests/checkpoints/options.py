"""What a demo checkpoint can be, and the interface of the families that write one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from tests.checkpoints.tokenizer import Vocabulary

Dtype = Literal["float32", "bfloat16"]
Weights = Literal["random", "dummy"]


@dataclass(frozen=True)
class Options:
    """What is to be written."""

    size: str
    """One of the family's `sizes` or `genuine_sizes`."""
    vocabulary: Vocabulary
    dtype: Dtype
    weights: Weights
    seed: int
    pipeline: str | None = None
    """One of the family's `pipelines`; None if it has none."""


class DemoFamily(Protocol):
    """Writes the checkpoints of one model family."""

    sizes: tuple[str, ...]
    genuine_sizes: Mapping[str, int]
    """Names of published models -> GB of weights in bfloat16."""
    pipelines: tuple[str, ...]
    """Kinds of models that the family has, the default first; empty if there is one."""

    def write(self, folder: Path, options: Options) -> None:
        """Write all files into the empty `folder`."""
        ...

    def num_parameters(self, folder: Path) -> int:
        """Returns the number of parameters of the checkpoint in `folder`, with or without weights."""
        ...
