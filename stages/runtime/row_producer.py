"""The producing half of an edge: what a model family has to say about its rows."""

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
"""Types that rows may have."""


class RowProducer(Protocol):
    """Runs in the producing worker, after the model is loaded.

    Constructed as `RowProducer(model, model_dir)`, `model` being vLLM's model of the stage.
    """

    def __init__(self, model: nn.Module, model_dir: Path) -> None: ...

    def rows(
        self, hidden: torch.Tensor, embeds: torch.Tensor, without_embedding: torch.Tensor | None
    ) -> torch.Tensor:
        """Rows of some positions, `[n, width]`, a fresh tensor.

        `hidden` and `embeds` `[n, width]` are the model's last hidden state and its input at these positions;
        `without_embedding` `[n]` (bool) marks those where `prompt_mask` was set.
        """
        ...

    def prompt_mask(self, prompt_token_ids: list[int], modalities: Set[str]) -> npt.NDArray[np.bool_] | None:
        """Positions of the prompt that are treated specially by `rows`; `modalities` are those with media."""
        ...

    def boundary_rows(self, voice: str) -> torch.Tensor:
        """Rows between the prompt's last and the first generated one, `[k, width]` on the CPU."""
        ...

    def tail_rows(self) -> torch.Tensor:
        """Rows behind the last one, `[t, width]` on the CPU; the last one repeats."""
        ...
