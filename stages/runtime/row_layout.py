"""What lies where in the slab of one step, and how the inline transport cuts it up again."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from omni_server.protocol.rows import InlineBlock, RowDtype, RowsPayload, Segment, SharedBlock

_DTYPE_NAMES: dict[torch.dtype, RowDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}

_POSITION_BYTES = 12  # int32 on three axes


@dataclass(frozen=True)
class SlabPart:
    """What one request has in the slab: the computed rows of positions `first` .. `first + count - 1` of the
    producer's sequence, and what goes with them."""

    prompt_length: int
    first: int
    count: int
    boundary: torch.Tensor  # [k, width], rows between the prompt's last and the first generated one
    tail: torch.Tensor | None  # [t, width], with a request's first part
    positions: tuple[torch.Tensor, int] | None
    """M-RoPE positions of the whole prompt `[3, prompt_length]` and their delta, if the part lies in the prompt."""

    @property
    def num_in_prompt(self) -> int:
        return max(0, min(self.first + self.count, self.prompt_length) - self.first)


@dataclass(frozen=True)
class SlabLayout:
    """First all computed rows, part after part; behind them what is constant or small."""

    payloads: list[RowsPayload]
    """Per part, without its block."""
    num_bytes: int
    _extras: list[tuple[int, torch.Tensor]]

    def write_extras(self, slab: torch.Tensor) -> None:
        """Everything but the computed rows, which lie at the start; `slab` is `[>= num_bytes]` uint8 on the CPU."""
        for offset, extra in self._extras:
            flat = extra.contiguous().view(-1).view(torch.uint8)
            slab[offset : offset + len(flat)] = flat


def lay_out(parts: Sequence[SlabPart], *, width: int, dtype: torch.dtype) -> SlabLayout:
    """For computed rows `[sum of count, width]` of `dtype`."""
    row_bytes = width * dtype.itemsize
    payloads: list[RowsPayload] = []
    extras: list[tuple[int, torch.Tensor]] = []
    row_offset, end = 0, sum(part.count for part in parts) * row_bytes

    def put(extra: torch.Tensor) -> int:
        nonlocal end
        offset = end
        extras.append((offset, extra))
        end += extra.nbytes
        return offset

    for part in parts:
        last, in_prompt = part.first + part.count, part.num_in_prompt
        segments = []
        if in_prompt:
            segments.append(Segment(part.first, in_prompt, row_offset))
            if last >= part.prompt_length:
                segments.append(Segment(part.prompt_length, len(part.boundary), put(part.boundary.to(dtype))))
        if part.count > in_prompt:
            first_generated = part.first + in_prompt + len(part.boundary)
            segments.append(Segment(first_generated, part.count - in_prompt, row_offset + in_prompt * row_bytes))
        tail = None if part.tail is None else Segment(0, len(part.tail), put(part.tail.to(dtype)))
        positions_offset, delta = None, 0
        if part.positions is not None:
            positions, delta = part.positions
            positions_offset = put(positions[:, part.first : part.first + in_prompt].to(torch.int32))
        payloads.append(
            RowsPayload(
                prompt_length=part.prompt_length,
                num_generated_rows=max(0, last - part.prompt_length),
                width=width,
                dtype=_DTYPE_NAMES[dtype],
                block=InlineBlock(b""),
                segments=tuple(segments),
                tail=tail,
                positions_offset=positions_offset,
                num_positions=in_prompt if positions_offset is not None else 0,
                position_delta=delta,
            )
        )
        row_offset += part.count * row_bytes
    return SlabLayout(payloads, end, extras)


def in_slot(payload: RowsPayload, block: SharedBlock) -> RowsPayload:
    """The payload with its block in shared memory."""
    return msgspec.structs.replace(payload, block=block)


def with_own_bytes(payload: RowsPayload, slab: torch.Tensor) -> RowsPayload:
    """The payload with a block that holds nothing but its own parts."""
    row_bytes = payload.width * (4 if payload.dtype == "float32" else 2)
    data = bytearray()

    def take(offset: int, size: int) -> int:
        start = len(data)
        data.extend(slab[offset : offset + size].numpy().tobytes())
        return start

    def moved(segment: Segment) -> Segment:
        return Segment(segment.first_position, segment.num_rows, take(segment.offset, segment.num_rows * row_bytes))

    segments = tuple(moved(s) for s in payload.segments)
    tail = None if payload.tail is None else moved(payload.tail)
    positions = None
    if payload.positions_offset is not None:
        positions = take(payload.positions_offset, _POSITION_BYTES * payload.num_positions)
    return msgspec.structs.replace(
        payload, block=InlineBlock(bytes(data)), segments=segments, tail=tail, positions_offset=positions
    )
