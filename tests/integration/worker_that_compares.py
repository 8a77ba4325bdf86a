"""A worker that prepares each step of the fast path once more as vLLM does, and ends where anything is not as
it was prepared.

Named as `worker_cls` by `answers_on_v2`; runs where vLLM's V2 kernels run.
"""

from dataclasses import fields
from typing import Any

import numpy as np
import torch

from stages.runtime.ar_runner_v2 import ARModelRunnerV2Mixin, RowModelStateMixin, step_batch
from stages.runtime.embeddings_in import RowUpload
from stages.runtime.stage_worker import ARWorker


class ComparingRunnerMixin(ARModelRunnerV2Mixin):
    # Of vLLM's runner:
    req_states: Any
    input_buffers: Any
    block_tables: Any

    def prepare_attn(self, input_batch: Any) -> Any:
        """The last of what the fast path skips before the model's state has its turn."""
        fast_path = self.model_state.fast_path
        made = super().prepare_attn(input_batch)
        if fast_path is None or fast_path.blocks_and_slots() is None:
            return made
        ours = self._inputs(input_batch, made)
        # By the very state and buffers; what was prepared is overwritten.
        runner: Any = super(ARModelRunnerV2Mixin, self)
        batch = runner.prepare_inputs(*self._asked)
        blocks_and_slots = runner.prepare_attn(batch)
        state: Any = super(RowModelStateMixin, self.model_state)
        embeds = state.prepare_inputs_embeds({}, batch, self.req_states)
        self.row_overlay._upload = RowUpload()  # not what was uploaded for a step before
        self.row_overlay.apply(embeds, step_batch(batch))
        state.prepare_inputs(batch, self.req_states)
        vllms = self._inputs(batch, blocks_and_slots)
        assert ours.keys() == vllms.keys()
        for name, value in vllms.items():
            assert same(ours[name], value), f"{name}: {ours[name]}, and vLLM's: {value}"
        return made

    def prepare_inputs(self, *args: Any) -> Any:
        self._asked = args
        return super().prepare_inputs(*args)

    def _inputs(self, batch: Any, blocks_and_slots: Any) -> dict[str, Any]:
        """All that the step's model and sampler are given, copied."""
        (blocks,), slots = blocks_and_slots
        state: Any = self.model_state
        buffers = self.input_buffers
        num_blocks = -(-int(batch.seq_lens.max()) // self.block_tables.block_sizes[0])
        values = {field.name: getattr(batch, field.name) for field in fields(batch)} | {
            "all query_start_loc": buffers.query_start_loc,
            "all seq_lens": buffers.seq_lens,
            "blocks": blocks[:, :num_blocks],
            "slots": slots,
            "all slots": self.block_tables.slot_mappings,
            "rope": state.rope_state.positions[:, : batch.num_tokens],
            "embeds": state.inputs_embeds[: batch.num_tokens],
        }
        return {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }


def same(ours: Any, vllms: Any) -> bool:
    if isinstance(vllms, torch.Tensor):
        return ours.dtype == vllms.dtype and torch.equal(ours, vllms)
    if isinstance(vllms, np.ndarray):
        return ours.dtype == vllms.dtype and np.array_equal(ours, vllms)
    return type(ours) is type(vllms) and bool(ours == vllms)


class ComparingWorker(ARWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runner_mixin = ComparingRunnerMixin
