"""Which streams have state, and where.

A stream is an utterance that comes in windows. Behind a window stays, in a slot of `StreamKV`, what the DiT
kept, and here the end of the mel spectrogram, which is the vocoder's left margin in the next window. There is
a fixed number of slots. A new stream that finds none free takes that of the stream whose last window is the
longest ago.

A slot is freed by the last window of its stream. A stream that ends without one, because its request was
aborted, keeps its slot until others need it. So nothing grows, and with S slots and L live streams a live one
loses its state only if more than S - L others have ended without a last window since its own last one. Its
next window is then computed from the codes that it brings along, as if there were no streams.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.qwen2_5_omni.code2wav.packing import Carry
from stages.qwen2_5_omni.codec_window import CodecWindow


@dataclass(frozen=True)
class _State:
    """What the last window of a stream left behind."""

    slot: int
    end: int
    """It emitted the codes before this one."""
    mel: torch.Tensor
    """Mel frames of the codes before `end`, as many as the vocoder's margin asks for or all there are;
    float32 [num_frames, mel_dim] on the device."""


class StreamTable:
    """The state of streams by name."""

    def __init__(self, num_slots: int, *, codes_per_block: int, frames_per_code: int) -> None:
        """Without slots no state is kept."""
        self._codes_per_block = codes_per_block
        self._frames_per_code = frames_per_code
        # The one whose last window is the longest ago first.
        self.states: OrderedDict[str, _State] = OrderedDict()
        self.free_slots = list(range(num_slots))

    def end_of(self, stream: str) -> int | None:
        """The code that the stream's next window emits first; None where nothing is known of it: it has not
        begun, has ended, or had to make room."""
        state = self.states.get(stream)
        return None if state is None else state.end

    def enter(self, windows: Sequence[CodecWindow]) -> list[Carry | None]:
        """What each window finds; None for those that are computed by themselves and leave nothing behind.

        `leave` or `abandon` must follow; until then, a window's slot belongs to nobody else. Raises
        `ValueError` for two windows of one stream.
        """
        names = [window.stream for window in windows if window.stream is not None]
        if len(set(names)) < len(names):
            raise ValueError("two windows of one stream: the second one needs what the first leaves behind")
        # All out of the table before the first slot is given away: no window of this batch may lose its own.
        states = [None if w.stream is None else self.states.pop(w.stream, None) for w in windows]
        return [self._carry(window, state) for window, state in zip(windows, states, strict=True)]

    def leave(
        self,
        windows: Sequence[CodecWindow],
        carries: Sequence[Carry | None],
        tails: Sequence[torch.Tensor | None],
    ) -> None:
        """The windows have been computed.

        tails: the mel frames before `emit_end` that a next window asks for; None where none follows.
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
        """Computing the windows failed, midway perhaps: their streams' state is lost."""
        self.free_slots.extend(carry.slot for carry in carries if carry is not None)

    def num_margin_codes(self, window: CodecWindow, end: int) -> int:
        """Codes before `end` whose mel frames the vocoder wants as context of what follows."""
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
        """Of the blocks that are computed, which begin at code `start`, the last one that is emitted."""
        return None if window.is_last else (window.emit_end - start) // self._codes_per_block - 1

    def _new_slot(self) -> int | None:
        if self.free_slots:
            return self.free_slots.pop()
        if self.states:
            return self.states.popitem(last=False)[1].slot
        return None  # there are fewer slots than windows in this batch
