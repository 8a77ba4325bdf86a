"""Windows of codec tokens laid end to end in blocks, so that one pass of the DiT serves them all.

The DiT's attention never looks further than one block of mel frames to each side, and everything else in it
works on single frames. So a batch needs no common length: the blocks of all windows lie in one row, and each
block says whether its neighbours belong to the same window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from omni_server.config.stages import DiffusionStage


@dataclass(frozen=True)
class Carry:
    """What a window has to do with the state of its stream."""

    slot: int
    """Of `StreamKV`."""
    is_read: bool
    """The slot holds the block before the first one of the window."""
    kept_block: int | None
    """The block, counted from the window's first, that is kept there for the next window, if there is one."""
    mel: torch.Tensor | None = field(default=None, compare=False)
    """If the slot is read: the mel frames right before `emit_start`, float32 [num_frames, mel_dim]."""


@dataclass(frozen=True)
class MelJob:
    """One window."""

    codes: torch.Tensor
    """int64 [num_codes] on the CPU."""
    noise: torch.Tensor
    """float32 [num_codes * frames per code, mel_dim] on the CPU."""
    voice: int
    """Index of the voice in the order that `PackedDiT` was given."""
    carry: Carry | None = None
    """Its part in a stream. If it reads, `codes` and `noise` begin behind the block that it reads."""


class BlockLayout:
    """Where the blocks of some windows lie: int32 [num_blocks] each, on the DiT's device."""

    index: torch.Tensor
    """The block's place in the positions of the rotary embedding. They count from the window's start, or, if
    the window reads a slot, from the start of the block in it: only differences matter."""
    num_frames: torch.Tensor
    """Valid frames; only the last block of a window can have fewer than the block size."""
    has_previous: torch.Tensor
    """1 if the block before is of the same window."""
    has_next: torch.Tensor
    """1 if the block behind is of the same window."""
    voice: torch.Tensor
    """Row of the voice tables."""
    read_slot: torch.Tensor
    """Slot of `StreamKV` that holds the block before, which the window itself lacks, or -1."""
    kept_slot: torch.Tensor
    """Slot of `StreamKV` that this block is kept in, or -1."""

    def __init__(self, table: torch.Tensor, block_size: int) -> None:
        """table: int32 [7, num_blocks], a row for each of the above; block_size: mel frames per block."""
        self.table = table
        self.block_size = block_size
        self.num_blocks = table.shape[1]
        self.index, self.num_frames, self.has_previous, self.has_next = table[:4]
        self.voice, self.read_slot, self.kept_slot = table[4:]

    def first(self, num_blocks: int) -> "BlockLayout":
        """View of the first `num_blocks` blocks."""
        return BlockLayout(self.table[:, :num_blocks], self.block_size)


@dataclass(frozen=True)
class PackedWindows:
    """Blocks of several windows in the windows' order, padded at the end to a wanted number of blocks."""

    layout: BlockLayout
    codes: torch.Tensor
    """int64 [num_blocks, codes per block]; 0 behind the end of a window."""
    noise: torch.Tensor
    """float32 [num_blocks, frames per block, mel_dim]; 0 behind the end of a window."""
    spans: list[tuple[int, int]]
    """Per window its first frame in the row of all blocks and its number of frames."""


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


def empty_table(num_blocks: int, block_size: int) -> torch.Tensor:
    """The table of a `BlockLayout` on the CPU: windows of one whole block each, of voice 0 and no stream. Every
    block has valid frames: attention over no key gives NaN."""
    table = torch.zeros(7, num_blocks, dtype=torch.int32)
    table[1] = block_size
    table[5:] = -1
    return table


def pack_windows(
    jobs: Sequence[MelJob], *, codes_per_block: int, num_blocks: int, device: torch.device
) -> PackedWindows:
    """Lay windows out in `num_blocks` blocks on `device`; those that are left over are windows of silence of
    one block each."""
    mel_dim = jobs[0].noise.shape[1]
    block_size = codes_per_block * (len(jobs[0].noise) // len(jobs[0].codes))
    packed_codes = torch.zeros(num_blocks * codes_per_block, dtype=torch.int64)
    packed_noise = torch.zeros(num_blocks * block_size, mel_dim)
    table = empty_table(num_blocks, block_size)
    index, num_frames, has_previous, has_next, voice, read_slot, kept_slot = table
    spans: list[tuple[int, int]] = []
    start = 0
    for job in jobs:
        codes, noise, carry = job.codes, job.noise, job.carry
        count = num_blocks_of(len(codes), codes_per_block)
        end = start + count
        first_frame = start * block_size
        packed_codes[start * codes_per_block :][: len(codes)] = codes
        packed_noise[first_frame:][: len(noise)] = noise
        index[start:end] = torch.arange(count, dtype=torch.int32)
        num_frames[end - 1] = len(noise) - (count - 1) * block_size
        has_previous[start + 1 : end] = 1
        has_next[start : end - 1] = 1
        voice[start:end] = job.voice
        if carry is not None and carry.is_read:
            index[start:end] += 1
            read_slot[start] = carry.slot
        if carry is not None and carry.kept_block is not None:
            kept_slot[start + carry.kept_block] = carry.slot
        spans.append((first_frame, len(noise)))
        start = end

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        # Page-locked, so that the copies do not wait for the device.
        source = tensor.pin_memory() if device.type == "cuda" else tensor
        return source.to(device, non_blocking=True)

    return PackedWindows(
        BlockLayout(on_device(table), block_size),
        on_device(packed_codes).view(num_blocks, codes_per_block),
        on_device(packed_noise).view(num_blocks, block_size, mel_dim),
        spans,
    )
