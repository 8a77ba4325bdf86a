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


class RowProducer(Protocol):
    """Runs in the producing worker after the model is loaded.

    Constructed as `RowProducer(model, model_dir)`, where `model` is the stage's vLLM model.
    """

    def __init__(self, model: nn.Module, model_dir: Path) -> None: ...

    def rows(
        self, hidden: torch.Tensor, embeds: torch.Tensor, without_embedding: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns rows `[n, width]` as a new tensor.

        `hidden` and `embeds` `[n, width]` are the model's last hidden state and its input at these positions.
        `without_embedding` `[n]` (bool) marks positions set in `prompt_mask`.
        """
        ...

    def prompt_mask(self, prompt_token_ids: list[int], modalities: Set[str]) -> npt.NDArray[np.bool_] | None:
        """Marks prompt positions that `rows` treats specially. `modalities`: those of the request's media."""
        ...

    def boundary_rows(self, voice: str) -> torch.Tensor:
        """Rows between the last prompt row and the first generated row, `[k, width]` on the CPU."""
        ...

    def tail_rows(self) -> torch.Tensor:
        """Rows that follow the last row, `[t, width]` on the CPU. The final one repeats."""
        ...
