"""Embeddings out: rows of the requests that feed another stage leave with the step that has computed them."""

import logging
from collections.abc import Callable, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import InlineBlock, RowsOutput, RowsPayload, SharedBlock, encode
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.request_slots import RequestSlots, grown
from stages.runtime.row_producer import RowProducer
from stages.runtime.slab_layout import IN_SLAB, SlabLayout, with_own_bytes
from stages.runtime.stage_step import StepBatch, TakenSlot, open_queue

logger = logging.getLogger(__name__)

_Ints = npt.NDArray[np.int64]

PromptPositions = Callable[[str], tuple[torch.Tensor, int] | None]
"""Request id -> M-RoPE positions `[3, prompt_length]` and delta of its prompt, or None without M-RoPE."""


@dataclass(frozen=True)
class _Source:
    """A request whose rows are wanted; the rest is in the emitter's arrays."""

    voice: str
    prompt_mask: npt.NDArray[np.bool_] | None


@dataclass(frozen=True)
class _Parts:
    """The parts of requests in this step's slab, `[num_parts]` each, in batch order."""

    batch_index: _Ints
    slot: _Ints
    first: _Ints  # position of the first row that is sent
    count: _Ints
    flat_offset: _Ints  # index in the flat batch


@dataclass
class PendingRows:
    """Rows on their way to the host. `finish` waits for the copy and gives one message per request."""

    request_ids: list[str]
    """Of the whole step, in batch order."""
    messages: list[tuple[int, RowsPayload]]
    """Index in the batch, and the message without its bytes if these are `inline`."""
    counts: _Ints
    """Rows that each of `messages` is about, one after the other in `target`."""
    target: torch.Tensor
    """`[num_rows, width]` on the host, where the rows are copied to."""
    copied: torch.cuda.Event | None
    inline: torch.Tensor | None
    keep: tuple[torch.Tensor, ...]
    """Sources of the copy, not to be reused by the allocator before it is done."""
    corrupt: dict[str, Corruption] = field(default_factory=dict)
    """By request, what is wrong with its rows; known when `finish` has returned."""

    def finish(self) -> list[torch.Tensor | None]:
        """Per request of the step, in batch order: the encoded `RowsPayload` as a uint8 tensor, or None."""
        if self.copied is not None:
            self.copied.synchronize()
        self.keep = ()
        if not all_finite(self.target):
            self._find_corrupt()
        outputs: list[torch.Tensor | None] = [None] * len(self.request_ids)
        for batch_index, payload in self.messages:
            if self.inline is not None:
                payload = with_own_bytes(payload, self.inline)
            outputs[batch_index] = torch.frombuffer(bytearray(encode(payload)), dtype=torch.uint8)
        return outputs

    def _find_corrupt(self) -> None:
        for (batch_index, payload), rows in zip(
            self.messages, self.target.split(self.counts.tolist()), strict=True
        ):
            if not all_finite(rows):
                first = payload.segments[0].first_position
                self.corrupt[self.request_ids[batch_index]] = Corruption(
                    "rows", f"NaN or infinity in the rows from position {first} on"
                )


class RowEmitter:
    """Sends rows; lives in the worker whose output vLLM returns (tensor-parallel rank 0)."""

    def __init__(self, producer: RowProducer, queue: QueueSpec, device: torch.device) -> None:
        self._producer = producer
        self._queue: SlabQueue | None = open_queue(queue)
        self._sources: dict[str, _Source] = {}
        self._slots = RequestSlots()
        # Per slot. High-water mark: positions below it were sent; after a preemption they are computed again,
        # not sent again.
        self._next_position: _Ints = np.zeros(1, np.int64)
        self._prompt_length: _Ints = np.zeros(1, np.int64)
        self._tail = producer.tail_rows()
        self._on_device = device.type == "cuda"
        self._copy_stream = torch.cuda.Stream(device) if self._on_device else None
        if self._on_device and self._queue is not None:
            self._pin(self._queue)

    def __len__(self) -> int:
        return len(self._sources)

    def add(
        self, request_id: str, output: RowsOutput, prompt_token_ids: list[int], modalities: Set[str]
    ) -> None:
        mask = self._producer.prompt_mask(prompt_token_ids, modalities)
        self._sources[request_id] = _Source(output.voice, mask)
        slot = self._slots.add(request_id)
        self._next_position = grown(self._next_position, slot + 1)
        self._prompt_length = grown(self._prompt_length, slot + 1)
        self._next_position[slot] = 0
        self._prompt_length[slot] = len(prompt_token_ids) - output.num_reply

    def remove(self, request_id: str) -> None:
        self._sources.pop(request_id, None)
        self._slots.remove(request_id)

    def emit(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        prompt_positions: PromptPositions,
        slot: TakenSlot | None,
    ) -> PendingRows | None:
        """Start sending the rows of this step; None if no request of it has new ones.

        `hidden` and `embeds` are `[>= num_tokens, width]`: the model's last hidden state and its input. With
        a shared-memory queue the scheduler must have taken a `slot`, which is given back here if it is not
        needed.
        """
        parts = self._parts(batch)
        if parts is None:
            if slot is not None and self._queue is not None:
                self._queue.publish(slot.slot, slot.generation, 0)
            return None
        if self._queue is not None and slot is None:
            raise RuntimeError("rows to send, but the scheduler took no slot for this step")
        rows = self._rows(batch, parts, hidden, embeds)
        layout = self._lay_out(
            batch, parts, rows, prompt_positions, slot if self._queue is not None else None
        )
        inline: torch.Tensor | None = None
        if self._queue is None:
            inline = slab = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=self._on_device)
        else:
            assert slot is not None
            if layout.num_bytes > self._queue.slot_bytes:
                raise RuntimeError(f"{layout.num_bytes} bytes of rows in a slot of {self._queue.slot_bytes}")
            slab = torch.frombuffer(self._queue.slot_buffer(slot.slot), dtype=torch.uint8)
            self._queue.publish(slot.slot, slot.generation, len(layout.payloads))
        layout.write_extras(slab)
        target = slab[: rows.nbytes].view(rows.dtype).view(rows.shape)
        copied = self._copy(rows, target)
        messages = list(zip(parts.batch_index.tolist(), layout.payloads, strict=True))
        return PendingRows(list(batch.request_ids), messages, parts.count, target, copied, inline, (rows,))

    def _parts(self, batch: StepBatch) -> _Parts | None:
        slots = self._slots.of_batch(batch.request_ids)
        first = batch.first_positions
        end = first + batch.num_tokens
        sent = np.where(slots >= 0, self._next_position[slots], end)  # the others send none
        if (gap := sent < first).any():
            index = int(gap.argmax())
            raise RuntimeError(
                f"{batch.request_ids[index]}: positions {sent[index]} to {first[index]} were not computed "
                "here; requests that send rows must not read the prefix cache"
            )
        (chosen,) = np.nonzero(sent < end)
        if not len(chosen):
            return None
        slot, start = slots[chosen], sent[chosen]
        self._next_position[slot] = end[chosen]
        return _Parts(chosen, slot, start, end[chosen] - start, batch.offsets[chosen] + start - first[chosen])

    def _rows(
        self, batch: StepBatch, parts: _Parts, hidden: torch.Tensor, embeds: torch.Tensor
    ) -> torch.Tensor:
        """Rows of all parts one after the other, `[num_rows, width]`, a fresh tensor on the device: with CUDA
        graphs `hidden` and `embeds` are static buffers that the next replay overwrites."""
        offsets, counts = parts.flat_offset, parts.count
        num_rows = int(counts.sum())
        start, end = int(offsets[0]), int(offsets[-1] + counts[-1])
        if end - start == num_rows:  # one contiguous range
            hidden, embeds = hidden[start:end], embeds[start:end]
        else:
            before = np.cumsum(counts) - counts
            index = async_tensor_h2d(np.repeat(offsets - before, counts) + np.arange(num_rows), hidden.device)
            hidden, embeds = hidden[index], embeds[index]
        mask = self._mask(batch, parts, num_rows)
        without = None if mask is None else async_tensor_h2d(mask, hidden.device)
        return self._producer.rows(hidden, embeds, without)

    def _mask(self, batch: StepBatch, parts: _Parts, num_rows: int) -> npt.NDArray[np.bool_] | None:
        """Of the parts' rows, those where `prompt_mask` is set, `[num_rows]`; None if there are none."""
        mask: npt.NDArray[np.bool_] | None = None
        offsets = np.cumsum(parts.count) - parts.count
        for part in np.flatnonzero(parts.first < self._prompt_length[parts.slot]).tolist():
            prompt_mask = self._sources[batch.request_ids[parts.batch_index[part]]].prompt_mask
            if prompt_mask is None:
                continue
            first, offset = parts.first[part], offsets[part]
            sent_mask = prompt_mask[first : first + parts.count[part]]
            if sent_mask.any():
                if mask is None:
                    mask = np.zeros(num_rows, np.bool_)
                mask[offset : offset + len(sent_mask)] = sent_mask
        return mask

    def _lay_out(
        self,
        batch: StepBatch,
        parts: _Parts,
        rows: torch.Tensor,
        prompt_positions: PromptPositions,
        slot: TakenSlot | None,
    ) -> SlabLayout:
        layout = SlabLayout(len(rows), width=rows.shape[1], dtype=rows.dtype)
        block: SharedBlock | InlineBlock = IN_SLAB
        for portion, (index, first, count, prompt_length) in enumerate(
            zip(
                parts.batch_index.tolist(),
                parts.first.tolist(),
                parts.count.tolist(),
                self._prompt_length[parts.slot].tolist(),
                strict=True,
            )
        ):
            if slot is not None:
                block = SharedBlock(slot.slot, slot.generation, portion)
            request_id = batch.request_ids[index]
            layout.add(
                block,
                prompt_length=prompt_length,
                first=first,
                count=count,
                boundary=self._producer.boundary_rows(self._sources[request_id].voice),
                tail=self._tail if first == 0 else None,
                positions=prompt_positions(request_id) if first < prompt_length else None,
            )
        return layout

    def _copy(self, rows: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event | None:
        if self._copy_stream is None:
            target.copy_(rows)
            return None
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            target.copy_(rows, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._copy_stream)
        return copied

    @staticmethod
    def _pin(queue: SlabQueue) -> None:
        """Page-lock the queue's memory, so that copies from the device run beside the next step.

        A refusal (a low memlock limit) costs speed only: copies then are not concurrent with the step.
        """
        whole = torch.frombuffer(queue.slot_buffer(0), dtype=torch.uint8)
        status = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), queue.capacity * queue.slot_bytes, 0)
        if int(status) != 0:
            logger.warning(
                "cannot page-lock the row queue (CUDA error %d): copies will be slower", int(status)
            )


def all_finite(rows: torch.Tensor) -> bool:
    """Whether rows in host memory hold no NaN and no infinity.

    NaN is the minimum and the maximum of what it is in. `isfinite` is not vectorized for bfloat16: 64 rows of
    3584 would take 0.9 ms instead of 0.04.
    """
    if rows.numel() == 0:
        return True
    return bool(torch.isfinite(torch.stack(rows.aminmax())).all())
