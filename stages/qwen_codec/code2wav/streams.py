"""Tracks which streams have state, and in which slot of `StreamState`.

The number of slots is fixed. If none is free, a new stream takes the slot of the least recently used stream.
The last window of a stream frees its slot. A stream that ends without one, because its request was aborted,
keeps its slot until others need it. So nothing grows, and with S slots and L live streams, a live stream
loses its state only if more than S - L others have ended without a last window since its own latest window.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from stages.qwen_codec.codec_window import CodecWindow


@dataclass(frozen=True)
class Place:
    """Where a window finds and leaves its stream's state."""

    slot: int
    seen: range | None
    """Absolute indices of the frames whose effect is in the slot's state; None if it is not the stream's."""


class StreamTable:
    """The slots of streams by name."""

    def __init__(self, num_slots: int) -> None:
        # Slot, and frames that its state has seen. In order of use, the least recently used first.
        self._states: OrderedDict[str, tuple[int, range]] = OrderedDict()
        self.free_slots = list(range(num_slots))

    def end_of(self, stream: str) -> int | None:
        """The first frame of the stream's next window, or None if the stream is unknown: it has not begun,
        has ended, or has lost its state."""
        state = self._states.get(stream)
        return None if state is None else state[1].stop

    def enter(self, windows: Sequence[CodecWindow]) -> list[Place]:
        """Returns each window's place. Call `leave` or `abandon` afterwards; until then, no other window can
        use the slots. No two windows are of one stream, and there are no more of them than slots."""
        # Remove all before assigning the first slot: no window of this batch may lose its own.
        states = [self._states.pop(window.stream, None) for window in windows]
        places = []
        for window, state in zip(windows, states, strict=True):
            slot, seen = (self._new_slot(), None) if state is None else state
            is_next = seen is not None and seen.stop == window.first_frame
            places.append(Place(slot, seen if is_next else None))
        return places

    def leave(self, windows: Sequence[CodecWindow], places: Sequence[Place], seen: Sequence[range]) -> None:
        """The windows have been computed, and the states have seen these frames."""
        for window, place, frames in zip(windows, places, seen, strict=True):
            if window.is_last:
                self.free_slots.append(place.slot)
            else:
                self._states[window.stream] = (place.slot, frames)

    def abandon(self, places: Sequence[Place]) -> None:
        """Drop the streams' state because computing the windows failed, maybe midway."""
        self.free_slots.extend(place.slot for place in places)

    def _new_slot(self) -> int:
        if self.free_slots:
            return self.free_slots.pop()
        return self._states.popitem(last=False)[1][0]
