"""What the tests of both generations' runners have in common: a stage that sends rows, and a step's later
output."""

from pathlib import Path
from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from omni_server.protocol.runtime_config import QueueSpec, StageRuntimeConfig

WIDTH = 4
INLINE = QueueSpec(capacity=1, path=None, slot_bytes=0, max_portions=8, num_consumers=1)


class SumProducer:
    """Rows are hidden state plus embedding."""

    hidden_layer: int | None = None

    def __init__(self, model: Any, model_dir: Path) -> None:
        self.model_dir = model_dir

    def rows(self, hidden: torch.Tensor, embeds: torch.Tensor, without: torch.Tensor | None) -> torch.Tensor:
        return hidden + embeds

    def prompt_mask(self, prompt_token_ids: list[int], modalities: Any) -> None:
        return None

    def boundary_rows(self, voice: str) -> torch.Tensor:
        return torch.full((1, WIDTH), 100.0)

    def tail_rows(self) -> torch.Tensor:
        return torch.full((2, WIDTH), 200.0)


class LayerProducer(SumProducer):
    """Rows are what comes out of layer 3."""

    hidden_layer: int | None = 3

    def rows(self, hidden: torch.Tensor, embeds: torch.Tensor, without: torch.Tensor | None) -> torch.Tensor:
        return hidden.clone()


class LayeredModel:
    """Returns hidden states of layers that are named, as vLLM's models do for EAGLE 3."""

    supports_eagle3 = True
    embed_input_ids: Any
    layers: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.layers = layers

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        raise NotImplementedError

    has_own_lm_head = has_own_embed_tokens = False


SENDING = StageRuntimeConfig(model_dir="", row_producer=f"{__name__}:SumProducer", output_queue=INLINE)
SENDING_LAYER = StageRuntimeConfig(
    model_dir="", row_producer=f"{__name__}:LayerProducer", output_queue=INLINE
)
LOOKING_UP = StageRuntimeConfig(model_dir="", input_queues=(INLINE,), row_table=True)


class AsyncOutput(AsyncModelRunnerOutput):
    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def get_output(self) -> ModelRunnerOutput:
        return self.output


def embedded(ids: torch.Tensor) -> torch.Tensor:
    """Id i as a row of i, `[num_tokens, WIDTH]`."""
    return ids.float()[:, None].repeat(1, WIDTH)
