"""Embeddings out: sends the rows of requests that feed another stage with the step that computed them."""

import logging
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.utils.torch_utils import async_tensor_h2d

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import (
    InlineBlock,
    RowsOutput,
    RowsPayload,
    Segment,
    SharedBlock,
    SourceSpan,
    encode,
)
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.row_producer import DTYPE_NAMES, RowProducer
from stages.runtime.stage_step import StepBatch, TakenSlot, open_queue

logger = logging.getLogger(__name__)


@dataclass
class _Source:
    """A request whose rows are sent."""

    prompt_length: int
    prompt_mask: npt.NDArray[np.bool_] | None
    positions: torch.Tensor | None
    """M-RoPE positions of the consumer's prompt and of text behind it, float32 `[3, n]`."""
    boundary: torch.Tensor
    spans: tuple[SourceSpan, ...] | None
    last_sent: float
    """No row is sent from this position on."""
    next_position: int = 0
    """High-water mark: positions below it were sent. A preemption recomputes but does not resend them."""

    def runs(self, first: int, count: int, flat_offset: int) -> "list[_Run]":
        """What to send of `count` computed positions from `first`."""
        runs: list[_Run] = []
        if self.spans is None:
            in_prompt = max(0, min(count, self.prompt_length - first))
            behind = first + in_prompt
            if in_prompt:
                runs.append(_Run(first, in_prompt, flat_offset, first))
            if in_prompt < count:
                target_first = behind + len(self.boundary)
                runs.append(_Run(behind, count - in_prompt, flat_offset + in_prompt, target_first))
            return runs
        for span in self.spans:
            start = max(first, span.source_first)
            end = min(first + count, span.source_first + span.count)
            if span.has_rows and start < end:
                target_first = span.target_first + start - span.source_first
                runs.append(_Run(start, end - start, flat_offset + start - first, target_first))
        return runs


@dataclass(frozen=True)
class _Run:
    """Consecutive computed rows."""

    first: int  # position of the first one
    count: int
    flat_offset: int  # index in the flat batch
    target_first: int  # position in the consumer's sequence


@dataclass(frozen=True)
class _Part:
    """The computed rows that a step sends for one request."""

    batch_index: int
    source: _Source
    runs: list[_Run]  # not empty

    @property
    def count(self) -> int:
        return sum(run.count for run in self.runs)


@dataclass(frozen=True)
class _Message:
    """One request's part of a step's slab."""

    batch_index: int
    payload: RowsPayload  # with an empty block if the bytes are sent inline
    rows: slice  # of the slab's bytes
    extras: slice  # of the slab's bytes


class _SlabLayout:
    """The layout of a step's slab: first the computed rows of all parts, in the order of `add`, then the
    constant and small data."""

    def __init__(self, rows: torch.Tensor, tail: torch.Tensor) -> None:
        """`rows`: the computed rows of all parts, `[num_rows, width]`."""
        self._width, self._dtype = rows.shape[1], rows.dtype
        self._tail = tail
        self._next_row = 0  # offset in bytes
        self._extras: list[tuple[int, torch.Tensor]] = []
        self.num_bytes = rows.nbytes

    def add(self, part: _Part, block: SharedBlock | InlineBlock) -> _Message:
        """Offsets in the message are relative to the slab, or to the inline block, in which the rows precede
        the extras."""
        source, row_bytes = part.source, self._width * self._dtype.itemsize
        rows_at, extras_at = self._next_row, self.num_bytes
        self._next_row += part.count * row_bytes
        offset, extras_shift = rows_at, 0
        if isinstance(block, InlineBlock):
            offset, extras_shift = 0, part.count * row_bytes - extras_at
        first, last = part.runs[0].first, part.runs[-1].first + part.runs[-1].count
        segments: list[Segment] = []
        located: list[torch.Tensor] = []  # positions of segments, each with that of what follows it
        for run in part.runs:
            segments.append(Segment(run.target_first, run.count, offset))
            offset += run.count * row_bytes
            if source.positions is not None and run.first < source.prompt_length:
                located.append(source.positions[:, run.target_first : run.target_first + run.count + 1])
        if source.spans is None and first < source.prompt_length <= last:
            boundary = self._put(source.boundary.to(self._dtype)) + extras_shift
            segments.insert(1, Segment(source.prompt_length, len(source.boundary), boundary))
        tail = None
        if source.spans is None and first == 0:
            tail = Segment(0, len(self._tail), self._put(self._tail.to(self._dtype)) + extras_shift)
        payload = RowsPayload(
            prompt_length=source.prompt_length,
            num_generated_rows=max(0, last - source.prompt_length),
            width=self._width,
            dtype=DTYPE_NAMES[self._dtype],
            block=block,
            segments=tuple(segments),
            tail=tail,
            positions_offset=self._put(torch.cat(located, 1)) + extras_shift if located else None,
            num_positions=sum(positions.shape[1] for positions in located),
        )
        rows, extras = slice(rows_at, self._next_row), slice(extras_at, self.num_bytes)
        return _Message(part.batch_index, payload, rows, extras)

    def _put(self, extra: torch.Tensor) -> int:
        offset = self.num_bytes
        self._extras.append((offset, extra))
        self.num_bytes += extra.nbytes
        return offset

    def write_extras(self, slab: torch.Tensor) -> None:
        """Write all but the computed rows. `slab` is `[>= num_bytes]` uint8 on the CPU."""
        for offset, extra in self._extras:
            flat = extra.contiguous().view(-1).view(torch.uint8)
            slab[offset : offset + len(flat)] = flat


@dataclass
class PendingRows:
    """Rows being copied to the host. `finish` waits for the copy and returns one message per request."""

    request_ids: list[str]
    """The whole step, in batch order."""
    messages: list[_Message]
    rows: torch.Tensor | None
    """Source of the copy. Held so that the allocator does not reuse it early."""
    slab: torch.Tensor
    target: torch.Tensor
    """The start of the slab, as `[num_rows, width]`."""
    copied: torch.cuda.Event | None
    corrupt: dict[str, Corruption] = field(default_factory=dict)
    """Corrupt rows by request. Known once `finish` has returned."""

    def finish(self) -> list[torch.Tensor | None]:
        """Returns each request's encoded `RowsPayload` as a uint8 tensor, or None, in batch order."""
        if self.copied is not None:
            self.copied.synchronize()
        self.rows = None
        if not all_finite(self.target):
            self._find_corrupt()
        outputs: list[torch.Tensor | None] = [None] * len(self.request_ids)
        for message in self.messages:
            payload = message.payload
            if isinstance(payload.block, InlineBlock):
                data = b"".join(self.slab[part].numpy().tobytes() for part in (message.rows, message.extras))
                payload = msgspec.structs.replace(payload, block=InlineBlock(data))
            outputs[message.batch_index] = torch.frombuffer(bytearray(encode(payload)), dtype=torch.uint8)
        return outputs

    def _find_corrupt(self) -> None:
        for message in self.messages:
            if not all_finite(self.slab[message.rows].view(self.target.dtype)):
                first = message.payload.segments[0].first_position
                self.corrupt[self.request_ids[message.batch_index]] = Corruption(
                    "rows", f"NaN or infinity in the rows from position {first} on"
                )


class RowEmitter:
    """Sends rows. Runs in the worker whose output vLLM returns (tensor-parallel rank 0)."""

    def __init__(self, producer: RowProducer, queue: QueueSpec, device: torch.device) -> None:
        self._producer = producer
        self._queue: SlabQueue | None = open_queue(queue)
        self._sources: dict[str, _Source] = {}
        self._tail = producer.tail_rows()
        self._on_device = device.type == "cuda"
        self._copy_stream = torch.cuda.Stream(device) if self._on_device else None
        if self._on_device and self._queue is not None:
            _pin(self._queue)

    def __len__(self) -> int:
        return len(self._sources)

    def add(
        self,
        request_id: str,
        output: RowsOutput,
        prompt_token_ids: list[int],
        modalities: Set[str],
        positions: torch.Tensor | None,
    ) -> None:
        """`positions`: M-RoPE positions of the part of the consumer's prompt that comes from here (see
        `consumer_prompt`), and of text behind it, float32 `[3, n + 1]`; None without M-RoPE."""
        self._sources[request_id] = _Source(
            len(prompt_token_ids) - output.num_reply,
            self._producer.prompt_mask(prompt_token_ids, modalities),
            positions,
            self._producer.boundary_rows(output.voice),
            output.spans,
            last_sent(output),
        )

    def remove(self, request_id: str) -> None:
        self._sources.pop(request_id, None)

    def emit(
        self, batch: StepBatch, hidden: torch.Tensor, embeds: torch.Tensor, slot: TakenSlot | None
    ) -> PendingRows | None:
        """Start sending the rows of this step. Returns None if no request in it has new rows.

        `hidden` and `embeds` are `[>= num_tokens, hidden_size]`: the hidden state that the producer needs,
        and the model's input. With a shared-memory queue the scheduler must have taken a `slot`, which is
        returned here if not needed.
        """
        parts = self._parts(batch)
        if not parts:
            if slot is not None and self._queue is not None:
                self._queue.publish(slot.slot, slot.generation, 0)
            return None
        if self._queue is not None and slot is None:
            raise RuntimeError("rows to send, but the scheduler took no slot for this step")
        rows = self._rows(parts, hidden, embeds)
        layout = _SlabLayout(rows, self._tail)
        if slot is None or self._queue is None:
            messages = [layout.add(part, InlineBlock(b"")) for part in parts]
            slab = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=self._on_device)
        else:
            messages = [
                layout.add(part, SharedBlock(slot.slot, slot.generation, portion, self._queue.number))
                for portion, part in enumerate(parts)
            ]
            if layout.num_bytes > self._queue.slot_bytes:
                raise RuntimeError(f"{layout.num_bytes} bytes of rows in a slot of {self._queue.slot_bytes}")
            slab = torch.frombuffer(self._queue.slot_buffer(slot.slot), dtype=torch.uint8)
            self._queue.publish(slot.slot, slot.generation, len(parts))
        layout.write_extras(slab)
        target = slab[: rows.nbytes].view(rows.dtype).view(rows.shape)
        copied = self._copy(rows, target)
        return PendingRows(list(batch.request_ids), messages, rows, slab, target, copied)

    def _parts(self, batch: StepBatch) -> list[_Part]:
        parts = []
        for index, (request_id, first, count, offset) in enumerate(batch.parts()):
            source = self._sources.get(request_id)
            if source is None or first >= source.last_sent:
                continue
            start, end = source.next_position, first + count
            if start < first:
                raise RuntimeError(
                    f"{request_id}: positions {start} to {first} were not computed here; requests that send "
                    "rows must not read the prefix cache"
                )
            if start < end:
                source.next_position = end
                runs = source.runs(start, end - start, offset + start - first)
                if runs:
                    parts.append(_Part(index, source, runs))
        return parts

    def _rows(self, parts: list[_Part], hidden: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """Concatenates the rows of all parts, `[num_rows, width]`, into a new tensor on the device: with CUDA
        graphs, `hidden` and `embeds` are static buffers that the next replay overwrites."""
        runs = [(part.source, run) for part in parts for run in part.runs]
        num_rows = sum(run.count for _, run in runs)
        start, end = runs[0][1].flat_offset, runs[-1][1].flat_offset + runs[-1][1].count
        if end - start == num_rows:  # one contiguous range
            hidden, embeds = hidden[start:end], embeds[start:end]
        else:
            ranges = [np.arange(run.flat_offset, run.flat_offset + run.count) for _, run in runs]
            index = async_tensor_h2d(np.concatenate(ranges), hidden.device)
            hidden, embeds = hidden[index], embeds[index]
        mask, offset = np.zeros(num_rows, np.bool_), 0
        for source, run in runs:
            if source.prompt_mask is not None:
                of_run = source.prompt_mask[run.first : run.first + run.count]
                mask[offset : offset + len(of_run)] = of_run
            offset += run.count
        without = async_tensor_h2d(mask, hidden.device) if mask.any() else None
        return self._producer.rows(hidden, embeds, without)

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


def last_sent(output: RowsOutput) -> float:
    """The producer's position behind the last one whose row is sent; infinity if there is no last one."""
    if output.spans is None:
        return math.inf
    return max((span.source_first + span.count for span in output.spans if span.has_rows), default=0)


def consumer_prompt(
    length: int, features: Sequence[MultiModalFeatureSpec], spans: Sequence[SourceSpan] | None
) -> tuple[int, list[MultiModalFeatureSpec]]:
    """The length of what a consumer's prompt has of the producer's, which has `length` tokens, and the media
    in it at their places there. Without `spans`, it has all."""
    if spans is None:
        return length, list(features)
    moved = []
    for feature in features:
        place = feature.mm_position
        for span in spans:
            index = place.offset - span.source_first
            if 0 <= index < span.count:
                moved.append(replace(feature, mm_position=replace(place, offset=span.target_first + index)))
    return max((span.target_first + span.count for span in spans), default=0), moved


def _pin(queue: SlabQueue) -> None:
    """Page-lock the queue's memory, so that copies from the device overlap the next step.

    A failure (a low memlock limit) only costs speed: copies then do not overlap the step.
    """
    whole = torch.frombuffer(queue.slot_buffer(0), dtype=torch.uint8)
    status = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), queue.capacity * queue.slot_bytes, 0)
    if int(status) != 0:
        logger.warning("cannot page-lock the row queue (CUDA error %d): copies will be slower", int(status))


def all_finite(rows: torch.Tensor) -> bool:
    """Whether rows in host memory contain no NaN or infinity.

    A NaN makes both the minimum and the maximum NaN. `isfinite` is not vectorized for bfloat16: 64 rows of
    3584 would take 0.9 ms instead of 0.04 ms.
    """
    if rows.numel() == 0:
        return True
    return bool(torch.isfinite(torch.stack(rows.aminmax())).all())
