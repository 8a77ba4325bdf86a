"""What lies where in the slab of one step, and how the inline transport cuts it up again."""

import msgspec
import torch

from omni_server.protocol.rows import InlineBlock, RowDtype, RowsPayload, Segment, SharedBlock

ROW_DTYPES: dict[RowDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_DTYPE_NAMES = {dtype: name for name, dtype in ROW_DTYPES.items()}

_POSITION_BYTES = 12  # int32 on three axes

IN_SLAB = InlineBlock(b"")
"""Block of a payload whose rows are still in the slab, to be copied out by `with_own_bytes`."""


class SlabLayout:
    """First all computed rows, part after part in the order in which they are added; then what is constant or
    small. One payload per part."""

    def __init__(self, num_rows: int, *, width: int, dtype: torch.dtype) -> None:
        """For computed rows `[num_rows, width]` of `dtype`."""
        self._width = width
        self._dtype = dtype
        self._dtype_name = _DTYPE_NAMES[dtype]
        self._row_bytes = width * dtype.itemsize
        self._next_row = 0  # offset
        self._extras: list[tuple[int, torch.Tensor]] = []
        self.num_bytes = num_rows * self._row_bytes
        self.payloads: list[RowsPayload] = []

    def add(
        self,
        block: SharedBlock | InlineBlock,
        *,
        prompt_length: int,
        first: int,
        count: int,
        boundary: torch.Tensor,
        tail: torch.Tensor | None = None,
        positions: tuple[torch.Tensor, int] | None = None,
    ) -> None:
        """What one request has in the slab: the computed rows of positions `first` to `first + count - 1` of
        the producer's sequence, and what goes with them.

        `boundary` `[k, width]`: rows between the prompt's last and the first generated one. `tail`
        `[t, width]`: with a request's first part. `positions`: M-RoPE positions of the whole prompt
        `[3, prompt_length]` and their delta, while the part begins in the prompt.
        """
        last = first + count
        in_prompt = max(0, min(last, prompt_length) - first)
        segments = []
        if in_prompt:
            segments.append(Segment(first, in_prompt, self._next_row))
            if last >= prompt_length:
                offset = self._put(boundary.to(self._dtype))
                segments.append(Segment(prompt_length, len(boundary), offset))
        if count > in_prompt:
            offset = self._next_row + in_prompt * self._row_bytes
            segments.append(Segment(first + in_prompt + len(boundary), count - in_prompt, offset))
        positions_offset, delta = None, 0
        if positions is not None:
            of_prompt, delta = positions
            positions_offset = self._put(of_prompt[:, first : first + in_prompt].to(torch.int32))
        self._next_row += count * self._row_bytes
        self.payloads.append(
            RowsPayload(
                prompt_length=prompt_length,
                num_generated_rows=max(0, last - prompt_length),
                width=self._width,
                dtype=self._dtype_name,
                block=block,
                segments=tuple(segments),
                tail=None if tail is None else Segment(0, len(tail), self._put(tail.to(self._dtype))),
                positions_offset=positions_offset,
                num_positions=in_prompt if positions_offset is not None else 0,
                position_delta=delta,
            )
        )

    def _put(self, extra: torch.Tensor) -> int:
        offset = self.num_bytes
        self._extras.append((offset, extra))
        self.num_bytes += extra.nbytes
        return offset

    def write_extras(self, slab: torch.Tensor) -> None:
        """Everything but the computed rows, which lie at the start; `slab` is `[>= num_bytes]` uint8 on the
        CPU."""
        for offset, extra in self._extras:
            flat = extra.contiguous().view(-1).view(torch.uint8)
            slab[offset : offset + len(flat)] = flat


def with_own_bytes(payload: RowsPayload, slab: torch.Tensor) -> RowsPayload:
    """The payload with a block that holds nothing but its own parts."""
    row_bytes = payload.width * ROW_DTYPES[payload.dtype].itemsize
    data = bytearray()

    def take(offset: int, size: int) -> int:
        start = len(data)
        data.extend(slab[offset : offset + size].numpy().tobytes())
        return start

    def moved(segment: Segment) -> Segment:
        return Segment(
            segment.first_position, segment.num_rows, take(segment.offset, segment.num_rows * row_bytes)
        )

    segments = tuple(moved(s) for s in payload.segments)
    tail = None if payload.tail is None else moved(payload.tail)
    positions = None
    if payload.positions_offset is not None:
        positions = take(payload.positions_offset, _POSITION_BYTES * payload.num_positions)
    return msgspec.structs.replace(
        payload, block=InlineBlock(bytes(data)), segments=segments, tail=tail, positions_offset=positions
    )
