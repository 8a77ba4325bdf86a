"""The decode fast path: one kernel prepares a step that has the same requests as the previous step.

The GPU finishes a small model's step before vLLM's V2 runner has prepared the next one: the runner copies the
state indices of the requests again, launches nine kernels, and builds the attention metadata. If a step has
the same requests as the previous one, with one token each, nearly all of that is still valid, and
`decode_fast_path_kernel` updates the rest. vLLM prepares every other step, and the next one builds on its
result.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import BatchReqState, GPUModelRunner

from stages.runtime.decode_fast_path_kernel import StepTensors, advance
from stages.runtime.embeddings_in import RowOverlay

BlocksAndSlots = tuple[tuple[torch.Tensor, ...], torch.Tensor]
"""A step's block tables and slot mappings, as returned by `GPUModelRunner.prepare_attn`."""


@runtime_checkable
class AddsRows(Protocol):
    """A model whose inputs combine token embeddings and rows."""

    def attends_by_kernel(self, metadata: dict[str, Any]) -> bool:
        """Whether a decode step with this vLLM metadata, by layer, reads only the block tables, lengths and
        slots, in vLLM's own buffers."""

    @property
    def token_embedding(self) -> VocabParallelEmbedding: ...


@dataclass
class _Last:
    """The previous step, which had one token per request."""

    batch: InputBatch
    descriptor: BatchExecutionDescriptor
    blocks_and_slots: BlocksAndSlots | None = None
    metadata: dict[str, Any] | None = None


class DecodeFastPath:
    """One per runner, created with its caches."""

    def __init__(
        self,
        runner: GPUModelRunner,
        overlay: RowOverlay,
        tensors: StepTensors,
        attends_by_kernel: Callable[[dict[str, Any]], bool] | None,
    ) -> None:
        """`attends_by_kernel`: `AddsRows`' own, or None if a decode step may run a graph captured with
        metadata of another kind of step."""
        self._requests = runner.req_states
        self._rope = runner.model_state.rope_state
        self._overlay = overlay
        self._tensors = tensors
        self._attends_by_kernel = attends_by_kernel
        self._last: _Last | None = None
        self.is_fast = False
        """Whether the current step takes its inputs from here."""
        self.num_steps = 0
        """Steps that took the fast path."""

    @classmethod
    def of(cls, runner: GPUModelRunner, overlay: RowOverlay) -> "DecodeFastPath | None":
        """Returns None if a step may depend on more than is updated here."""
        model, state, blocks, parallel = (
            runner.get_model(),
            runner.model_state,
            runner.block_tables,
            runner.parallel_config,
        )
        if (
            not isinstance(model, AddsRows)
            or not isinstance(model.token_embedding.quant_method, UnquantizedEmbeddingMethod)
            or parallel.world_size > 1
            or parallel.decode_context_parallel_size > 1
            or parallel.prefill_context_parallel_size > 1
            or parallel.data_parallel_size > 1
            or runner.lora_config is not None
            or runner.speculative_config is not None
            or runner.fast_prefill is not None
            or runner.model_config.rswa_window is not None
            or state.supports_mm_inputs
            or state.rope_state is None
            or state.rope_state.num_dims != 3
            or blocks.num_kv_cache_groups != 1
        ):
            return None
        inputs = runner.input_buffers
        tensors = StepTensors(
            num_computed=runner.req_states.num_computed_tokens.gpu,
            last_tokens=runner.req_states.last_sampled_tokens,
            block_table=blocks.block_tables[0].gpu,
            block_size=blocks.block_sizes[0],
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            lengths=inputs.seq_lens,
            slots=blocks.slot_mappings[0],
            step_blocks=blocks.input_block_tables[0],
            rope_positions=state.rope_state.positions,
            embedding=model.token_embedding.weight,
            embeds=state.inputs_embeds,
        )
        captured = runner.compilation_config.cudagraph_mode
        return cls(runner, overlay, tensors, model.attends_by_kernel if captured.separate_routine() else None)

    def forget(self) -> None:
        """Invalidate the last step: the runner's inputs have changed."""
        self._last = None
        self.is_fast = False

    # -- one step, in the runner's order

    def next_batch(
        self, requests: BatchReqState, descriptor: BatchExecutionDescriptor, has_grammars: bool
    ) -> InputBatch | None:
        """Returns the step's batch and starts writing its inputs to the model's buffers. Returns None if the
        runner must prepare the step and pass it to `prepared`."""
        last, self.is_fast = self._last, False
        if (
            last is None
            or last.blocks_and_slots is None
            or requests.has_prefill
            or requests.num_tokens != last.batch.num_reqs
            or requests.req_ids != last.batch.req_ids
            or descriptor != last.descriptor
            or has_grammars != last.batch.has_structured_output_reqs
            or not np.array_equal(requests.idx_mapping_np, last.batch.idx_mapping_np)
        ):
            return None
        num_computed = self._requests.num_computed_tokens_np[requests.idx_mapping_np]
        rows = self._overlay.added_rows(requests.req_ids, num_computed, self._tensors.embeds)
        if rows is None:
            return None
        assert self._rope is not None
        advance(self._tensors, last.batch.idx_mapping, self._rope.prefill_delta.gpu, rows)
        lengths = np.zeros(last.batch.num_reqs_after_padding, np.int32)
        lengths[: len(num_computed)] = num_computed + 1
        last.batch = replace(
            last.batch,
            num_computed_tokens_np=num_computed,
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
            num_computed_prefill_tokens_np=requests.num_computed_prefill_tokens_np,
        )
        self.is_fast = True
        self.num_steps += 1
        return last.batch

    def prepared(self, batch: InputBatch, descriptor: BatchExecutionDescriptor) -> None:
        """Record a batch that vLLM prepared."""
        is_decoding = batch.num_tokens == batch.num_reqs and not batch.has_prefill
        self._last = _Last(batch, descriptor) if is_decoding else None

    def blocks_and_slots(self) -> BlocksAndSlots | None:
        """Those of a fast step, or None: the runner then makes them and passes them to
        `keep_blocks_and_slots`."""
        return self._last.blocks_and_slots if self._last is not None and self.is_fast else None

    def keep_blocks_and_slots(self, made: BlocksAndSlots) -> None:
        if self._last is not None:
            self._last.blocks_and_slots = made

    def metadata(self) -> dict[str, Any] | None:
        """The last step's attention metadata, if a fast step's captured graph reads nothing of it."""
        return self._last.metadata if self._last is not None and self.is_fast else None

    def keep_metadata(self, made: dict[str, Any]) -> None:
        """Called for a step whose graph is captured. vLLM's own attention may store length-dependent data in
        the metadata (a plan, a schedule), and must then rebuild it in each step."""
        last = self._last
        if (
            last is not None
            and last.descriptor.uniform_token_count == 1  # captured for decode: contains our kernel
            and self._attends_by_kernel is not None
            and self._attends_by_kernel(made)
        ):
            last.metadata = made
