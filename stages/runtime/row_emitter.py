"""Rows out: picks the hidden states of the requests that feed another stage and sends them on."""

import logging
from collections.abc import Callable, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from omni_server.protocol.rows import RowsOutput, RowsPayload, SharedBlock, encode
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.batch import StepBatch, TakenSlot
from stages.runtime.queue_end import open_queue
from stages.runtime.row_layout import SlabPart, in_slot, lay_out, with_own_bytes
from stages.runtime.row_producer import RowProducer

logger = logging.getLogger(__name__)

PromptPositions = Callable[[str], tuple[torch.Tensor, int] | None]
"""Request id -> M-RoPE positions `[3, prompt_length]` and delta of its prompt, or None without M-RoPE."""


@dataclass
class _Source:
    """What is remembered about a request whose rows are wanted."""

    voice: str
    prompt_length: int
    prompt_mask: npt.NDArray[np.bool_] | None
    next_position: int = 0
    """High-water mark: positions below it were sent; after a preemption they are computed again, not sent again."""


@dataclass(frozen=True)
class _Share:
    """The part of one request in this step's slab."""

    batch_index: int
    request_id: str
    source: _Source
    first: int  # position of the first row that is sent
    count: int
    flat_offset: int  # index in the flat batch


class PendingRows:
    """Rows on their way to the host. `finish` waits for the copy and gives one message per request."""

    def __init__(
        self,
        num_requests: int,
        messages: list[tuple[int, RowsPayload]],
        copied: torch.cuda.Event | None,
        inline: torch.Tensor | None,
        keep: tuple[torch.Tensor, ...],
    ) -> None:
        self._num_requests = num_requests
        self._messages = messages
        self._copied = copied
        self._inline = inline
        self._keep = keep  # sources of the copy, not to be reused by the allocator before it is done

    def finish(self) -> list[torch.Tensor | None]:
        """Per request of the step, in batch order: the encoded `RowsPayload` as a uint8 tensor, or None."""
        if self._copied is not None:
            self._copied.synchronize()
        self._keep = ()
        outputs: list[torch.Tensor | None] = [None] * self._num_requests
        for batch_index, payload in self._messages:
            if self._inline is not None:
                payload = with_own_bytes(payload, self._inline)
            outputs[batch_index] = torch.frombuffer(bytearray(encode(payload)), dtype=torch.uint8)
        return outputs


class RowEmitter:
    """Lives in the worker whose output vLLM returns (tensor-parallel rank 0)."""

    def __init__(self, producer: RowProducer, queue: QueueSpec, device: torch.device) -> None:
        self._producer = producer
        self._queue: SlabQueue | None = open_queue(queue)
        self._sources: dict[str, _Source] = {}
        self._tail = producer.tail_rows()
        self._on_device = device.type == "cuda"
        self._copy_stream = torch.cuda.Stream(device) if self._on_device else None
        if self._on_device and self._queue is not None:
            self._pin(self._queue)

    def __len__(self) -> int:
        return len(self._sources)

    def add(self, request_id: str, output: RowsOutput, prompt_token_ids: list[int], modalities: Set[str]) -> None:
        mask = self._producer.prompt_mask(prompt_token_ids, modalities)
        self._sources[request_id] = _Source(output.voice, len(prompt_token_ids), mask)

    def remove(self, request_id: str) -> None:
        self._sources.pop(request_id, None)

    def emit(
        self,
        batch: StepBatch,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        prompt_positions: PromptPositions,
        slot: TakenSlot | None,
    ) -> PendingRows | None:
        """Start sending the rows of this step; None if no request of it has new ones.

        `hidden` and `embeds` are `[>= num_tokens, width]`: the model's last hidden state and its input. With a
        shared-memory queue the scheduler must have taken a `slot`, which is given back here if it is not needed.
        """
        shares = self._shares(batch)
        if not shares:
            if slot is not None and self._queue is not None:
                self._queue.publish(slot.slot, slot.generation, 0)
            return None
        rows = self._rows(shares, hidden, embeds)
        parts = [self._part(share, prompt_positions) for share in shares]
        layout = lay_out(parts, width=rows.shape[1], dtype=rows.dtype)
        payloads = layout.payloads
        inline: torch.Tensor | None = None
        if self._queue is None:
            inline = slab = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=self._on_device)
        else:
            if slot is None:
                raise RuntimeError("rows to send, but the scheduler took no slot for this step")
            if layout.num_bytes > self._queue.slot_bytes:
                raise RuntimeError(f"{layout.num_bytes} bytes of rows in a slot of {self._queue.slot_bytes}")
            slab = torch.frombuffer(self._queue.slot_buffer(slot.slot), dtype=torch.uint8)
            self._queue.publish(slot.slot, slot.generation, len(shares))
            payloads = [
                in_slot(payload, SharedBlock(slot.slot, slot.generation, portion))
                for portion, payload in enumerate(payloads)
            ]
        layout.write_extras(slab)
        target = slab[: rows.nbytes].view(rows.dtype).view(rows.shape)
        copied = self._copy(rows, target)
        messages = [(share.batch_index, payload) for share, payload in zip(shares, payloads, strict=True)]
        return PendingRows(len(batch.request_ids), messages, copied, inline, (rows,))

    def _shares(self, batch: StepBatch) -> list[_Share]:
        shares = []
        for index, (request_id, first, count, offset) in enumerate(
            zip(
                batch.request_ids,
                batch.first_positions.tolist(),
                batch.num_tokens.tolist(),
                batch.offsets.tolist(),
                strict=True,
            )
        ):
            source = self._sources.get(request_id)
            if source is None:
                continue
            sent_before = max(0, source.next_position - first)
            if sent_before >= count:
                continue
            if source.next_position < first:
                raise RuntimeError(
                    f"{request_id}: positions {source.next_position} to {first} were not computed here; "
                    "requests that send rows must not read the prefix cache"
                )
            source.next_position = first + count
            shares.append(
                _Share(index, request_id, source, first + sent_before, count - sent_before, offset + sent_before)
            )
        return shares

    def _rows(self, shares: list[_Share], hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """Rows of all shares one after the other, `[num_rows, width]`, a fresh tensor on the device: with CUDA
        graphs `hidden` and `embeds` are static buffers that the next replay overwrites."""
        device = hidden.device
        index = torch.cat([torch.arange(s.flat_offset, s.flat_offset + s.count) for s in shares])
        masks = [_mask_of(share) for share in shares]
        without = torch.from_numpy(np.concatenate(masks)).to(device) if any(m.any() for m in masks) else None
        index = index.to(device, non_blocking=True)
        return self._producer.rows(hidden[index], embeds[index], without)

    def _part(self, share: _Share, prompt_positions: PromptPositions) -> SlabPart:
        source = share.source
        return SlabPart(
            prompt_length=source.prompt_length,
            first=share.first,
            count=share.count,
            boundary=self._producer.boundary_rows(source.voice),
            tail=self._tail if share.first == 0 else None,
            positions=prompt_positions(share.request_id) if share.first < source.prompt_length else None,
        )

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

        A refusal (a low memlock limit) costs speed only: copies then wait for their turn.
        """
        whole = torch.frombuffer(queue.slot_buffer(0), dtype=torch.uint8)
        status = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), queue.capacity * queue.slot_bytes, 0)
        if int(status) != 0:
            logger.warning("cannot page-lock the row queue (CUDA error %d): copies will be slower", int(status))


def _mask_of(share: _Share) -> npt.NDArray[np.bool_]:
    mask = np.zeros(share.count, np.bool_)
    prompt_mask = share.source.prompt_mask
    if prompt_mask is not None:
        part = prompt_mask[share.first : share.first + share.count]
        mask[: len(part)] = part
    return mask
