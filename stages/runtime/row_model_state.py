"""vLLM's V2 runner keeps what depends on the model in a *model state*. Here a request's rows take part in it: they are
laid over the input embeddings, and bring M-RoPE positions or take them along.
"""

from collections.abc import Set
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.states import RequestState

from stages.runtime.batch import StepBatch
from stages.runtime.row_overlay import RowOverlay
from stages.runtime.steady_step import SteadySteps

Positions = tuple[torch.Tensor, int]
"""M-RoPE positions of a prompt `[3, num_tokens]` and what is added to an index behind it."""


class RowModelStateMixin:
    """Over `DefaultModelState` or a class derived from it."""

    model: Any
    device: torch.device
    rope_state: RopeState | None

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: EncoderCache | None,
        device: torch.device,
        *,
        overlay: RowOverlay,
        senders: Set[str],
        emits: bool,
    ) -> None:
        """`senders`: ids of requests that send rows, kept up to date by its owner. `emits`: this rank sends them."""
        super().__init__(vllm_config, model, encoder_cache, device)  # type: ignore[call-arg]
        self._overlay = overlay
        self._senders = senders
        self._emits = emits
        self._input_rows: torch.Tensor | None = None
        self._sent_positions: dict[str, Positions] = {}
        self.steady: SteadySteps | None = None
        """Steps that the runner need not prepare; made with its caches."""
        self._given_positions: list[tuple[int, Positions]] = []  # to be written with the other staged writes

    # -- requests come and go

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        if self.rope_state is None:
            return
        request_id = new_req_data.req_id
        if request_id in self._senders:
            # vLLM has just asked the model the same, but keeps the answer on the device only. A resumed request has
            # tokens behind its prompt, and a known answer.
            if self._emits and request_id not in self._sent_positions:
                self._sent_positions[request_id] = self.model.get_mrope_input_positions(
                    new_req_data.prompt_token_ids, new_req_data.mm_features
                )
            return
        # Positions of a fed request come from the stage that knows the image and audio grids.
        given = self._overlay.prompt_positions(request_id, len(new_req_data.prefill_token_ids or ()))
        if given is not None:
            self._given_positions.append((req_index, given))
            self.rope_state.prefill_delta.np[req_index] = given[1]

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()  # type: ignore[misc]
        for req_index, (positions, delta) in self._given_positions:
            assert self.rope_state is not None
            # Behind vLLM's own write for this request: writes that are staged together come in no order.
            on_device = async_tensor_h2d(positions, self.device, torch.int32)
            self.rope_state.update_prefill_positions(req_index, on_device, delta)
        self._given_positions.clear()

    def prompt_positions(self, request_id: str) -> Positions | None:
        """Of a request that sends rows; None without M-RoPE."""
        return self._sent_positions.get(request_id)

    def forget(self, request_id: str) -> None:
        """The request has ended. vLLM's `remove_request` also means that it was preempted."""
        self._sent_positions.pop(request_id, None)

    # -- one step

    def prepare_inputs_embeds(
        self, scheduled_encoder_inputs: dict[str, list[int]], input_batch: InputBatch, req_states: RequestState
    ) -> torch.Tensor:
        """A view of the buffer that CUDA graphs read, so rows are laid over it in place."""
        if self.steady is not None:
            ready = self.steady.inputs_embeds(input_batch.num_tokens_after_padding)
            if ready is not None:
                return ready
        inputs_embeds: torch.Tensor = super().prepare_inputs_embeds(  # type: ignore[misc]
            scheduled_encoder_inputs, input_batch, req_states
        )
        if len(self._overlay):
            self._overlay.apply(inputs_embeds, step_batch(input_batch))
        if self._emits and not self._senders.isdisjoint(input_batch.req_ids):
            # Before the forward pass: run eagerly, vLLM's CUDA normalisation (`fused_add_rms_norm`, in place) adds the
            # first layer's output into this very buffer.
            self._input_rows = inputs_embeds[: input_batch.num_tokens].clone()
        return inputs_embeds

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, torch.Tensor | None]:
        if self.steady is not None:
            positions = self.steady.rope_positions(input_batch.num_tokens_after_padding)
            if positions is not None:
                return {"positions": positions}
        return super().prepare_inputs(input_batch, req_states)  # type: ignore[misc,no-any-return]

    def prepare_attn(
        self, input_batch: InputBatch, cudagraph_mode: CUDAGraphMode, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        steady = self.steady if cudagraph_mode == CUDAGraphMode.FULL else None
        if steady is not None and (ready := steady.metadata()) is not None:
            return ready
        made: dict[str, Any] = super().prepare_attn(input_batch, cudagraph_mode, *args, **kwargs)  # type: ignore[misc]
        if steady is not None:
            steady.have_metadata(made)
        return made

    def take_input_rows(self) -> torch.Tensor | None:
        """The model's input in this step, `[num_tokens, width]`, if the step has rows to send."""
        rows, self._input_rows = self._input_rows, None
        return rows


def row_model_state(
    base: type[ModelState],
    vllm_config: VllmConfig,
    model: nn.Module,
    encoder_cache: EncoderCache | None,
    device: torch.device,
    *,
    overlay: RowOverlay,
    senders: Set[str],
    emits: bool,
) -> RowModelStateMixin:
    """The state of class `base`, vLLM's choice for the model, with rows.

    Raises `TypeError` for a class that prepares inputs in a way of its own, or has made the runner's sampler already.
    """
    if not issubclass(base, DefaultModelState) or base.custom_sampler is not ModelState.custom_sampler:
        raise TypeError(f"{base.__name__} prepares inputs or samples in a way of its own: rows cannot be added to it")
    state_class: type[RowModelStateMixin] = type(f"Row{base.__name__}", (RowModelStateMixin, base), {})
    return state_class(vllm_config, model, encoder_cache, device, overlay=overlay, senders=senders, emits=emits)


def step_batch(batch: InputBatch) -> StepBatch:
    """Views of vLLM's arrays of the step. Its order is vLLM's own: decoding requests first."""
    return StepBatch(
        request_ids=batch.req_ids,
        first_positions=batch.num_computed_tokens_np,
        num_tokens=batch.num_scheduled_tokens,
        offsets=batch.query_start_loc_np[: batch.num_reqs],
    )
