"""Cuts the codec tokens of a speech stream into decoder windows. The edge classes of all families use it."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.family.codec import DecoderWindow, Frame

F = TypeVar("F")
"""One frame of codec tokens, in any representation."""


@dataclass(frozen=True)
class Window(Generic[F]):
    """Consecutive frames of a speech stream, starting at `first_frame`. The decoder emits the audio of the
    frames from `emit_start` up to but excluding `emit_end`; the rest is context. Positions are absolute."""

    frames: tuple[F, ...]
    first_frame: int
    emit_start: int
    emit_end: int
    is_last: bool
    """Whether this is the last window of the stream."""

    @property
    def emitted(self) -> tuple[F, ...]:
        """The frames whose audio is emitted."""
        return self.frames[self.emit_start - self.first_frame : self.emit_end - self.first_frame]


class CodecChunker(Generic[F]):
    """Cuts the frames of one speech stream into windows.

    The windows depend only on the frames, the ramp and calls of `flush`, not on how the frames are split
    across other calls. The emitted spans are contiguous and cover every frame exactly once. No window is
    longer than the `past + new + future` blocks of its place in the ramp; the frames left at the end are
    fewer than a full window, because a full one would already have been cut. Frames that no later window
    needs are dropped."""

    def __init__(self, plan: ChunkPlan, frames_per_block: int) -> None:
        self._plan = plan
        self._ramp = tuple(plan.new_blocks)
        self._frames_per_block = frames_per_block
        self._frames: list[F] = []  # from the first frame that the next window sees
        self._first_frame = 0
        self._emitted = 0
        self._place_in_ramp = 0
        self._finished = False

    def use_ramp(self, new_blocks: Sequence[int]) -> None:
        """Replace the plan's numbers of new blocks. Raises `ValueError` after the first window."""
        if self._emitted:
            raise ValueError("another ramp after the first window")
        self._ramp = tuple(new_blocks)

    def push(self, frames: Iterable[F]) -> list[Window[F]]:
        """Add frames, in order. Returns the windows that are now complete."""
        if self._finished:
            raise ValueError("frames after finish()")
        self._frames.extend(frames)
        windows = []
        if self._plan.mode == "windows":
            while (window := self._next_full_window()) is not None:
                windows.append(window)
        return windows

    def flush(self) -> list[Window[F]]:
        """Cut a shorter window: the frames pause. Returns it if it has a block. The ramp begins anew after
        it."""
        end = self._first_frame + len(self._frames)
        num_blocks = (end - self._emitted) // self._frames_per_block - self._plan.future_blocks
        windows = []
        if num_blocks > 0 and self._plan.mode == "windows":
            emit_end = self._emitted + num_blocks * self._frames_per_block
            windows = [self._cut(emit_end=emit_end, end=end, is_last=False)]
        self._place_in_ramp = 0
        return windows

    def finish(self) -> list[Window[F]]:
        """End the stream. Returns the last window if any frames have not been emitted yet."""
        self._finished = True
        end = self._first_frame + len(self._frames)
        return [self._cut(emit_end=end, end=end, is_last=True)] if self._emitted < end else []

    def _next_full_window(self) -> Window[F] | None:
        new_blocks = self._ramp[min(self._place_in_ramp, len(self._ramp) - 1)]
        emit_end = self._emitted + new_blocks * self._frames_per_block
        end = emit_end + self._plan.future_blocks * self._frames_per_block
        if end > self._first_frame + len(self._frames):
            return None
        return self._cut(emit_end=emit_end, end=end, is_last=False)

    def _cut(self, *, emit_end: int, end: int, is_last: bool) -> Window[F]:
        window = Window(
            tuple(self._frames[: end - self._first_frame]),
            first_frame=self._first_frame,
            emit_start=self._emitted,
            emit_end=emit_end,
            is_last=is_last,
        )
        self._emitted = emit_end
        self._place_in_ramp += 1
        next_first = max(0, emit_end - self._plan.past_blocks * self._frames_per_block)
        del self._frames[: next_first - self._first_frame]
        self._first_frame = next_first
        return window


class ChunkedEdge(ABC):
    """Implements `omni_server.family.codec.CodecEdge` for one stream, except for the request of a window."""

    def __init__(self, plan: ChunkPlan, frames_per_block: int) -> None:
        self._chunker = CodecChunker[Frame](plan, frames_per_block)
        # Not the request's id: a client may reuse it while code2wav still has a window of the first use.
        self._stream = uuid.uuid4().hex

    @abstractmethod
    def _request(self, window: Window[Frame]) -> DecoderWindow: ...

    def use_ramp(self, new_blocks: Sequence[int]) -> None:
        self._chunker.use_ramp(new_blocks)

    def push(self, frames: Sequence[Frame]) -> list[DecoderWindow]:
        return [self._request(window) for window in self._chunker.push(frames)]

    def flush(self) -> list[DecoderWindow]:
        return [self._request(window) for window in self._chunker.flush()]

    def finish(self) -> list[DecoderWindow]:
        return [self._request(window) for window in self._chunker.finish()]
