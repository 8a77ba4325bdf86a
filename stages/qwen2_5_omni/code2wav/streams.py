"""Tracks which streams have state, and where.

A stream is speech that arrives in windows. After each window, a slot of `StreamKV` holds the DiT's state, and
this table the end of the mel spectrogram, which is the vocoder's left margin in the next window. The number
of slots is fixed. If none is free, a new stream takes the slot of the least recently used stream.

The last window of a stream frees its slot. A stream that ends without one, because its request was aborted,
keeps its slot until others need it. So nothing grows, and with S slots and L live streams, a live stream
loses its state only if more than S - L others have ended without a last window since its own latest window.
Its next window is then computed from the context that it contains, as if there were no streams.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.qwen2_5_omni.code2wav.packing import Carry
from stages.qwen2_5_omni.codec_window import CodecWindow


@dataclass(frozen=True)
class _State:
    """What a stream's latest window left."""

    slot: int
    end: int
    """First code that is not yet emitted."""
    mel: torch.Tensor
    """Mel frames of the codes before `end`, enough for the vocoder's margin or all there are; float32
    [num_frames, mel_dim] on the device."""


class StreamTable:
    """The state of streams by name."""

    def __init__(self, num_slots: int, *, codes_per_block: int, frames_per_code: int) -> None:
        """With 0 slots, keeps no state."""
        self._codes_per_block = codes_per_block
        self._frames_per_code = frames_per_code
        # In order of use, the least recently used first.
        self.states: OrderedDict[str, _State] = OrderedDict()
        self.free_slots = list(range(num_slots))

    def end_of(self, stream: str) -> int | None:
        """The first code that the stream's next window emits, or None if the stream is unknown: it has not
        begun, has ended, or was evicted."""
        state = self.states.get(stream)
        return None if state is None else state.end

    def enter(self, windows: Sequence[CodecWindow]) -> list[Carry | None]:
        """Returns each window's state, or None if a window neither reads nor leaves any.

        Call `leave` or `abandon` afterwards; until then, no other window can use the slots. No two windows
        are of one stream."""
        # Remove all before assigning the first slot: no window of this batch may lose its own.
        states = [None if w.stream is None else self.states.pop(w.stream, None) for w in windows]
        return [self._carry(window, state) for window, state in zip(windows, states, strict=True)]

    def leave(
        self,
        windows: Sequence[CodecWindow],
        carries: Sequence[Carry | None],
        tails: Sequence[torch.Tensor | None],
    ) -> None:
        """Store the state of the computed windows.

        tails: mel frames before `emit_end` for the next window; None if none follows.
        """
        for window, carry, tail in zip(windows, carries, tails, strict=True):
            if carry is None:
                continue
            if tail is None:
                self.free_slots.append(carry.slot)
            else:
                assert window.stream is not None
                self.states[window.stream] = _State(carry.slot, window.emit_end, tail)

    def abandon(self, carries: Sequence[Carry | None]) -> None:
        """Drop the streams' state because computing the windows failed, maybe midway."""
        self.free_slots.extend(carry.slot for carry in carries if carry is not None)

    def num_margin_codes(self, window: CodecWindow, end: int) -> int:
        """Number of codes before `end` whose mel frames are the vocoder's left margin."""
        return min(end, -(-window.vocoder_margin_frames // self._frames_per_code))

    def _carry(self, window: CodecWindow, state: _State | None) -> Carry | None:
        if window.stream is None:
            return None
        num_frames = self.num_margin_codes(window, window.emit_start) * self._frames_per_code
        if state is not None and state.end == window.emit_start and len(state.mel) >= num_frames:
            return Carry(state.slot, True, self._kept_block(window, state.end), state.mel)
        if window.is_last:
            if state is not None:
                self.free_slots.append(state.slot)
            return None
        slot = self._new_slot() if state is None else state.slot
        if slot is None:
            return None
        return Carry(slot, False, self._kept_block(window, window.first_code))

    def _kept_block(self, window: CodecWindow, start: int) -> int | None:
        """Index of the last emitted block, if the computed blocks start at code `start`."""
        return None if window.is_last else (window.emit_end - start) // self._codes_per_block - 1

    def _new_slot(self) -> int | None:
        if self.free_slots:
            return self.free_slots.pop()
        if self.states:
            return self.states.popitem(last=False)[1].slot
        return None  # fewer slots than windows in this batch
