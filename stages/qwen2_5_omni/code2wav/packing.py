"""Windows of codec tokens laid end to end in blocks, so that one pass of the DiT serves them all.

The DiT's attention never looks further than one block of mel frames to each side, and everything else in it
works on single frames. So a batch needs no common length: the blocks of all windows lie in one row, and each
block says whether its neighbours belong to the same window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omni_server.config.stages import DiffusionStage


@dataclass(frozen=True)
class Carry:
    """What a window has to do with the slot of its stream in `StreamKV`."""

    slot: int
    is_read: bool
    """The slot holds the block before the first one of the window."""
    kept_block: int | None
    """Which block of the window, counted from its first, is kept there for the next window; None: there is
    none."""


NO_SLOT = -1


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of some windows lie."""

    table: torch.Tensor
    """int32 [7, num_blocks] on the DiT's device, one row for each property below, in their order."""
    block_size: int
    """Mel frames per block."""

    @property
    def num_blocks(self) -> int:
        return self.table.shape[1]

    @property
    def index(self) -> torch.Tensor:
        """The block's place in the positions of the rotary embedding. They count from the window's start, or,
        if the window reads a slot, from the start of the block in it: only differences matter."""
        return self.table[0]

    @property
    def num_frames(self) -> torch.Tensor:
        """Valid frames; only the last block of a window can have fewer than the block size."""
        return self.table[1]

    @property
    def has_previous(self) -> torch.Tensor:
        """1 if the block before is of the same window."""
        return self.table[2]

    @property
    def has_next(self) -> torch.Tensor:
        """1 if the block behind is of the same window."""
        return self.table[3]

    @property
    def voice(self) -> torch.Tensor:
        """Row of the voice tables."""
        return self.table[4]

    @property
    def read_slot(self) -> torch.Tensor:
        """Slot of `StreamKV` that holds the block before, which the window itself lacks, or -1."""
        return self.table[5]

    @property
    def kept_slot(self) -> torch.Tensor:
        """Slot of `StreamKV` that this block is kept in, or -1."""
        return self.table[6]

    def first(self, num_blocks: int) -> "BlockLayout":
        """View of the first `num_blocks` blocks."""
        return BlockLayout(self.table[:, :num_blocks], self.block_size)

    def copy_(self, other: "BlockLayout") -> None:
        """Overwrite with another layout of the same size."""
        self.table.copy_(other.table)


@dataclass(frozen=True)
class PackedWindows:
    """Blocks of several windows in the windows' order, padded at the end to a wanted number of blocks."""

    layout: BlockLayout
    codes: torch.Tensor
    """int64 [num_blocks, codes per block]; 0 behind the end of a window."""
    noise: torch.Tensor
    """float32 [num_blocks, frames per block, mel_dim]; 0 behind the end of a window."""
    spans: tuple[tuple[int, int], ...]
    """Per window its first frame in the row of all blocks and its number of frames."""

    @property
    def num_blocks(self) -> int:
        return len(self.codes)


def num_blocks_of(num_codes: int, codes_per_block: int) -> int:
    """Blocks that a window of `num_codes` codec tokens takes."""
    return -(-num_codes // codes_per_block)


def max_num_blocks(stage: DiffusionStage, codes_per_block: int) -> int:
    """The most blocks that one step can hold, where the last block of each window may be a part of one."""
    partial = stage.max_num_seqs * (codes_per_block - 1)
    blocks_of_one = num_blocks_of(stage.max_model_len, codes_per_block)
    return min(
        (stage.max_num_batched_tokens + partial) // codes_per_block, stage.max_num_seqs * blocks_of_one
    )


def empty_layout(num_blocks: int, block_size: int, device: torch.device) -> BlockLayout:
    """Windows of one whole block each, of voice 0 and no stream."""
    return BlockLayout(_empty_table(num_blocks, block_size).to(device), block_size)


def _empty_table(num_blocks: int, block_size: int) -> torch.Tensor:
    """Every block has valid frames: attention over no key gives NaN."""
    table = torch.zeros(7, num_blocks, dtype=torch.int32)
    table[1] = block_size
    table[5:] = NO_SLOT
    return table


def pack_windows(
    codes: Sequence[torch.Tensor],
    noise: Sequence[torch.Tensor],
    voices: Sequence[int],
    carries: Sequence[Carry | None],
    *,
    codes_per_block: int,
    num_blocks: int,
    device: torch.device,
) -> PackedWindows:
    """Lay windows out in `num_blocks` blocks; those that are left over are windows of silence of one block
    each.

    codes: int64 [num_codes] on the CPU per window; noise: float32 [num_codes * frames per code, mel_dim] on
    the CPU; voices: rows of the voice tables; carries: None for a window by itself. The result lies on
    `device`.
    """
    mel_dim = noise[0].shape[1]
    frames_per_code = len(noise[0]) // len(codes[0])
    block_size = codes_per_block * frames_per_code
    packed_codes = torch.zeros(num_blocks * codes_per_block, dtype=torch.int64)
    packed_noise = torch.zeros(num_blocks * block_size, mel_dim)
    table = _empty_table(num_blocks, block_size)
    index, num_frames, has_previous, has_next, voice, read_slot, kept_slot = table
    spans: list[tuple[int, int]] = []
    start = 0
    for window_codes, window_noise, row, carry in zip(codes, noise, voices, carries, strict=True):
        count = num_blocks_of(len(window_codes), codes_per_block)
        end = start + count
        first_frame = start * block_size
        packed_codes[start * codes_per_block :][: len(window_codes)] = window_codes
        packed_noise[first_frame:][: len(window_noise)] = window_noise
        index[start:end] = torch.arange(count, dtype=torch.int32)
        num_frames[end - 1] = len(window_noise) - (count - 1) * block_size
        has_previous[start + 1 : end] = 1
        has_next[start : end - 1] = 1
        voice[start:end] = row
        if carry is not None and carry.is_read:
            index[start:end] += 1
            read_slot[start] = carry.slot
        if carry is not None and carry.kept_block is not None:
            kept_slot[start + carry.kept_block] = carry.slot
        spans.append((first_frame, len(window_noise)))
        start = end
    if device.type == "cuda":  # page-locked, so that the copies do not wait for the device
        packed_codes, packed_noise, table = (
            packed_codes.pin_memory(),
            packed_noise.pin_memory(),
            table.pin_memory(),
        )
    return PackedWindows(
        BlockLayout(table.to(device, non_blocking=True), block_size),
        packed_codes.to(device, non_blocking=True).view(num_blocks, codes_per_block),
        packed_noise.to(device, non_blocking=True).view(num_blocks, block_size, mel_dim),
        tuple(spans),
    )
