"""Tracks which streams have state, and in which slot of `StreamState`.

The number of slots is fixed. If none is free, a new stream takes the slot of the least recently used stream.
The last window of a stream frees its slot. A stream that ends without one, because its request was aborted,
keeps its slot until others need it. So nothing grows, and with S slots and L live streams, a live stream
loses its state only if more than S - L others have ended without a last window since its own latest window.

The state that a past leaves is kept for other streams that begin with it, such as those of one cloned voice.
New streams take free slots, then those of pasts, then that of the least recently used stream. A new past does
the same, but takes no slot that a window of its step needs: in a step, at most one stream per new past loses
its state to it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from stages.qwen_codec.codec_window import CodecWindow


@dataclass(frozen=True)
class PastState:
    """The state that a past leaves."""

    slot: int
    """The same for all windows that begin with this past."""
    is_computed: bool
    """Otherwise it must be computed before it is used."""


@dataclass(frozen=True)
class Place:
    """Where a window finds and leaves its stream's state."""

    slot: int
    seen: range | None
    """Absolute indices of the frames whose effect is in the slot's state; None if it is not the stream's."""
    past: PastState | None = None
    """What the stream begins with; None if there is nothing or no slot for it, and in later windows."""


class StreamTable:
    """The slots of streams by name."""

    def __init__(self, num_slots: int) -> None:
        # Slot, and frames that its state has seen. In order of use, the least recently used first.
        self._states: OrderedDict[str, tuple[int, range]] = OrderedDict()
        # The slots of kept pasts, by first frame behind them and codes, in the same order.
        self._pasts: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self.free_slots = list(range(num_slots))
        self._num_slots = num_slots

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
        keys = [_key(window) for window in windows]
        wanted = sorted(dict.fromkeys(filter(None, keys)), key=lambda key: key not in self._pasts)
        kept = [(key, self._pasts.pop(key, None)) for key in wanted[: self._num_slots - len(windows)]]
        pasts = {
            key: PastState(self._new_slot() if slot is None else slot, is_computed=slot is not None)
            for key, slot in kept
        }
        places = []
        for window, key, state in zip(windows, keys, states, strict=True):
            slot, seen = (self._new_slot(), None) if state is None else state
            is_next = seen is not None and seen.stop == window.first_frame
            places.append(Place(slot, seen if is_next else None, None if key is None else pasts.get(key)))
        return places

    def leave(self, windows: Sequence[CodecWindow], places: Sequence[Place], seen: Sequence[range]) -> None:
        """The windows and pasts have been computed, and the windows' states have seen these frames."""
        for window, place, frames in zip(windows, places, seen, strict=True):
            if place.past is not None and (key := _key(window)) is not None:
                self._pasts[key] = place.past.slot
            if window.is_last:
                self.free_slots.append(place.slot)
            else:
                self._states[window.stream] = (place.slot, frames)

    def abandon(self, places: Sequence[Place]) -> None:
        """Drop the state of streams and their pasts because computing the windows failed, maybe midway."""
        self.free_slots.extend(place.slot for place in places)
        self.free_slots.extend({place.past.slot for place in places if place.past is not None})

    def _new_slot(self) -> int:
        if self.free_slots:
            return self.free_slots.pop()
        if self._pasts:
            return self._pasts.popitem(last=False)[1]
        return self._states.popitem(last=False)[1][0]


def _key(window: CodecWindow) -> tuple[int, bytes] | None:
    """Identifies the state that the window's stream begins with; None if it begins with none."""
    return (window.first_frame, window.past) if window.is_first and window.past else None
