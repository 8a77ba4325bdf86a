"""The fast path of decoding: a step with the same requests as the one before it is prepared by one kernel.

The GPU finishes a small model's step before vLLM's V2 runner has prepared the next one: it copies the indices
of the requests' states anew, starts nine kernels, and builds attention's metadata. Where a step has the
requests of the one before it, with one token each, nearly all of that is still in place, and
`decode_fast_path_kernel` updates the rest. Any other step is prepared by vLLM, and the next one starts from
what it leaves.
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
"""Block tables and slot mappings of a step, as `GPUModelRunner.prepare_attn` returns them."""


@runtime_checkable
class AddsRows(Protocol):
    """A model whose inputs are token embeddings and rows."""

    def attends_by_kernel(self, metadata: dict[str, Any]) -> bool:
        """A decoding step with this metadata of vLLM's, by layer, reads block tables, lengths and slots where
        vLLM keeps them, and nothing else of it."""

    @property
    def token_embedding(self) -> VocabParallelEmbedding: ...


@dataclass
class _Last:
    """The step before, with one token of each request."""

    batch: InputBatch
    descriptor: BatchExecutionDescriptor
    blocks_and_slots: BlocksAndSlots | None = None
    metadata: dict[str, Any] | None = None


class DecodeFastPath:
    """One per runner, made when its caches are."""

    def __init__(
        self,
        runner: GPUModelRunner,
        overlay: RowOverlay,
        tensors: StepTensors,
        attends_by_kernel: Callable[[dict[str, Any]], bool] | None,
    ) -> None:
        """`attends_by_kernel`: `AddsRows`' own; None where a decoding step may run a graph that was captured
        with another step's metadata."""
        self._requests = runner.req_states
        self._rope = runner.model_state.rope_state
        self._overlay = overlay
        self._tensors = tensors
        self._attends_by_kernel = attends_by_kernel
        self._last: _Last | None = None
        self.is_fast = False
        """The step that is being made has its inputs from here."""
        self.num_steps = 0
        """Steps that took the fast path."""

    @classmethod
    def of(cls, runner: GPUModelRunner, overlay: RowOverlay) -> "DecodeFastPath | None":
        """None where a step may depend on more than what is updated here."""
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
        """The runner's inputs are no longer those of the last step."""
        self._last = None
        self.is_fast = False

    # -- one step, in the runner's order

    def next_batch(
        self, requests: BatchReqState, descriptor: BatchExecutionDescriptor, has_grammars: bool
    ) -> InputBatch | None:
        """The step's batch, with all inputs on their way to where the model reads them; None for a step that
        the runner has to prepare, and then to hand to `prepared`."""
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
        """The runner has prepared this batch."""
        is_decoding = batch.num_tokens == batch.num_reqs and not batch.has_prefill
        self._last = _Last(batch, descriptor) if is_decoding else None

    def blocks_and_slots(self) -> BlocksAndSlots | None:
        """Of a fast step; for another one the runner makes them, and hands them to
        `keep_blocks_and_slots`."""
        return self._last.blocks_and_slots if self._last is not None and self.is_fast else None

    def keep_blocks_and_slots(self, made: BlocksAndSlots) -> None:
        if self._last is not None:
            self._last.blocks_and_slots = made

    def metadata(self) -> dict[str, Any] | None:
        """The last step's attention metadata, where a fast step's captured graph reads nothing of it."""
        return self._last.metadata if self._last is not None and self.is_fast else None

    def keep_metadata(self, made: dict[str, Any]) -> None:
        """Called for a step whose graph is captured. vLLM's own attention may put into it what depends on the
        lengths (a plan, a schedule), and then has to make it anew in each step."""
        last = self._last
        if (
            last is not None
            and last.descriptor.uniform_token_count == 1  # captured for decoding: our kernel is in it
            and self._attends_by_kernel is not None
            and self._attends_by_kernel(made)
        ):
            last.metadata = made
