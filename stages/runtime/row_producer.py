"""The producing half of an edge: how a model family makes its rows."""

from collections.abc import Set
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from omni_server.protocol.rows import RowDtype

ROW_DTYPES: dict[RowDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Possible dtypes of rows."""

DTYPE_NAMES: dict[torch.dtype, RowDtype] = {dtype: name for name, dtype in ROW_DTYPES.items()}


class RowProducer(Protocol):
    """Runs in the producing worker after the model is loaded.

    Constructed as `RowProducer(model, model_dir)`, where `model` is the stage's vLLM model.
    """

    hidden_layer: int | None
    """The hidden state that `rows` gets: what this many decoder layers have made of the input, before any
    norm. None: the last one, which the model returns."""

    def __init__(self, model: nn.Module, model_dir: Path) -> None: ...

    def rows(
        self, hidden: torch.Tensor, embeds: torch.Tensor, without_embedding: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns rows `[n, width]` as a new tensor.

        `hidden` and `embeds` `[n, hidden_size]` are a hidden state of the model (`hidden_layer`) and its
        input at these positions.
        `without_embedding` `[n]` (bool) marks positions set in `prompt_mask`.
        """
        ...

    def prompt_mask(self, prompt_token_ids: list[int], modalities: Set[str]) -> npt.NDArray[np.bool_] | None:
        """Marks prompt positions that `rows` treats specially. `modalities`: those of the request's media."""
        ...

    def boundary_rows(self, voice: str) -> torch.Tensor:
        """Rows between the last prompt row and the first generated row, `[k, width]` on the CPU. Unused on an
        edge with text ids."""
        ...

    def tail_rows(self) -> torch.Tensor:
        """Rows that follow the last row, `[t, width]` on the CPU. The final one repeats. Unused on an edge
        with text ids."""
        ...
