"""Packs windows of codec tokens end to end in blocks, so that one pass of the DiT computes them all.

The DiT's attention reaches at most one block of mel frames to each side, and everything else in it works on
single frames. So a batch needs no common length: the blocks of all windows form one row, and each block
records whether its neighbours belong to the same window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from omni_server.config.stages import DiffusionStage


@dataclass(frozen=True)
class Carry:
    """How a window uses the state of its stream."""

    slot: int
    """In `StreamKV`."""
    is_read: bool
    """The slot holds the block before the window's first block."""
    kept_block: int | None
    """Index within the window of the block that the slot keeps for the next window, if there is one."""
    mel: torch.Tensor | None = field(default=None, compare=False)
    """If the slot is read, the mel frames just before `emit_start`, float32 [num_frames, mel_dim]."""


@dataclass(frozen=True)
class MelJob:
    """One window."""

    codes: torch.Tensor
    """int64 [num_codes] on the CPU."""
    noise: torch.Tensor
    """float32 [num_codes * frames per code, mel_dim] on the CPU."""
    voice: int
    """Index of the voice in the list passed to `PackedDiT`."""
    carry: Carry | None = None
    """Its stream's state. If it reads a slot, `codes` and `noise` start after the block in it."""


class BlockLayout:
    """The layout of packed blocks: int32 [num_blocks] each, on the DiT's device."""

    index: torch.Tensor
    """The block's index in rotary embedding positions. They count from the window's start or, if the window
    reads a slot, from the start of the block in it: only differences matter."""
    num_frames: torch.Tensor
    """Valid frames; only the last block of a window can have fewer than the block size."""
    has_previous: torch.Tensor
    """1 if the window has a previous block."""
    has_next: torch.Tensor
    """1 if the window has a next block."""
    voice: torch.Tensor
    """Row of the voice tables."""
    read_slot: torch.Tensor
    """Slot of `StreamKV` with the previous block, if the window itself lacks it, or -1."""
    kept_slot: torch.Tensor
    """Slot of `StreamKV` that keeps this block, or -1."""

    def __init__(self, table: torch.Tensor, block_size: int) -> None:
        """table: int32 [7, num_blocks], one row per field above; block_size: mel frames per block."""
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
    """Blocks of several windows in the windows' order, padded at the end to a given number of blocks."""

    layout: BlockLayout
    codes: torch.Tensor
    """int64 [num_blocks, codes per block]; 0 after the end of a window."""
    noise: torch.Tensor
    """float32 [num_blocks, frames per block, mel_dim]; 0 after the end of a window."""
    spans: list[tuple[int, int]]
    """Each window's first frame in the row of all blocks, and its frame count."""


def num_blocks_of(num_codes: int, codes_per_block: int) -> int:
    """Blocks in a window of `num_codes` codec tokens."""
    return -(-num_codes // codes_per_block)


def max_num_blocks(stage: DiffusionStage, codes_per_block: int) -> int:
    """The most blocks in one step, given that each window's last block may be partial."""
    partial = stage.max_num_seqs * (codes_per_block - 1)
    blocks_of_one = num_blocks_of(stage.max_model_len, codes_per_block)
    return min(
        (stage.max_num_batched_tokens + partial) // codes_per_block, stage.max_num_seqs * blocks_of_one
    )


def empty_table(num_blocks: int, block_size: int) -> torch.Tensor:
    """A `BlockLayout` table on the CPU: windows of one whole block each, with voice 0 and no stream. All
    blocks have valid frames, as attention over no keys gives NaN."""
    table = torch.zeros(7, num_blocks, dtype=torch.int32)
    table[1] = block_size
    table[5:] = -1
    return table


def pack_windows(
    jobs: Sequence[MelJob], *, codes_per_block: int, num_blocks: int, device: torch.device
) -> PackedWindows:
    """Pack windows into `num_blocks` blocks on `device`. Each remaining block is a one-block window with zero
    codes and noise."""
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
        # Pinned, so that the copies do not wait for the device.
        source = tensor.pin_memory() if device.type == "cuda" else tensor
        return source.to(device, non_blocking=True)

    return PackedWindows(
        BlockLayout(on_device(table), block_size),
        on_device(packed_codes).view(num_blocks, codes_per_block),
        on_device(packed_noise).view(num_blocks, block_size, mel_dim),
        spans,
    )
