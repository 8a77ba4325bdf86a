"""The producing half of the thinker -> talker edge: makes the talker's rows at positions of media.

Source: `Qwen3OmniMoeForConditionalGeneration.generate` and `_get_talker_user_parts` in transformers 5.19. A
row is the talker's projection of a hidden state in the middle of the thinker. Text needs none: the talker
makes its rows of token ids (`stages.qwen3_omni.talker_prompt`).
"""

from collections.abc import Set
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from omni_server.errors import ConfigError
from stages.qwen3_omni.thinker import Qwen3OmniThinker


class ThinkerToTalker:
    """Implements `stages.runtime.row_producer.RowProducer`."""

    def __init__(self, model: nn.Module, model_dir: Path) -> None:
        """Raises `ConfigError` if the checkpoint has no talker, or if the talker's layer is one that vLLM and
        the reference count differently."""
        assert isinstance(model, Qwen3OmniThinker)
        if model.talker_hidden_projection is None:
            raise ConfigError(f"{model_dir}: the checkpoint has no talker (enable_audio_output)")
        self._projection = model.talker_hidden_projection
        # vLLM adds what images contribute to the first layers before it takes a hidden state, the reference
        # after it. The reference's last hidden state has passed the norm, vLLM's has not.
        num_visual = len(model.config.vision_config.deepstack_visual_indexes)
        num_layers = model.config.text_config.num_hidden_layers
        if not num_visual < model.accept_hidden_layer < num_layers:
            raise ConfigError(
                f"{model_dir / 'config.json'}: talker_config.accept_hidden_layer must be from "
                f"{num_visual + 1} to {num_layers - 1}, not {model.accept_hidden_layer}"
            )
        self.hidden_layer: int | None = model.accept_hidden_layer
        weight = self._projection.linear_fc2.weight
        self._no_rows = torch.empty(0, len(weight), dtype=weight.dtype)

    @torch.inference_mode()
    def rows(
        self, hidden: torch.Tensor, embeds: torch.Tensor, without_embedding: torch.Tensor | None
    ) -> torch.Tensor:
        return self._projection(hidden)

    def prompt_mask(self, prompt_token_ids: list[int], modalities: Set[str]) -> npt.NDArray[np.bool_] | None:
        return None

    def boundary_rows(self, voice: str) -> torch.Tensor:
        return self._no_rows

    def tail_rows(self) -> torch.Tensor:
        return self._no_rows
