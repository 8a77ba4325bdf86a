"""Cuts the talker's codec tokens into windows for code2wav."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.errors import ConfigError
from omni_server.protocol.codec_window import CodecWindow


@dataclass(frozen=True)
class Window:
    """A window of codec tokens. Positions are absolute tokens of the utterance; see `CodecWindow`."""

    codes: tuple[int, ...]
    first_code: int
    emit_start: int
    emit_end: int
    vocoder_margin_frames: int
    is_last: bool

    def span(self, *, voice: str, noise_seed: int, stream: str | None = None) -> CodecWindow:
        """What code2wav is told about this window."""
        return CodecWindow(
            voice=voice,
            noise_seed=noise_seed,
            first_code=self.first_code,
            emit_start=self.emit_start,
            emit_end=self.emit_end,
            vocoder_margin_frames=self.vocoder_margin_frames,
            is_last=self.is_last,
            stream=stream,
        )


def check_chunk_plan(plan: ChunkPlan, *, codes_per_block: int, frames_per_code: int) -> None:
    """Raises `ConfigError` if the plan's windows cannot give the vocoder its margin."""
    if plan.mode == "whole":
        return
    for name, blocks in (("past_blocks", plan.past_blocks), ("future_blocks", plan.future_blocks)):
        frames = blocks * codes_per_block * frames_per_code
        if frames < plan.vocoder_margin_frames:
            raise ConfigError(
                f"chunks.{name} = {blocks} gives the vocoder {frames} mel frames of context, "
                f"vocoder_margin_frames asks for {plan.vocoder_margin_frames}: raise {name} or lower the margin"
            )


class CodecChunker:
    """Windows of one utterance.

    Which windows come out depends on the codes and the ramp only, not on the portions in which the codes
    arrive. The spans that are emitted follow each other without a gap and cover every code once. No window is
    longer than `past + new + future` blocks of its place in the ramp: what is left at the end is less than a
    full window, because a full one would have been cut before. Codes that no window needs any more are
    forgotten.
    """

    def __init__(self, plan: ChunkPlan, codes_per_block: int) -> None:
        self._plan = plan
        self._ramp = tuple(plan.new_blocks)
        self._codes_per_block = codes_per_block
        self._codes: list[int] = []  # from the first code that the next window sees
        self._first_code = 0
        self._emitted = 0
        self._num_windows = 0
        self._finished = False

    def use_ramp(self, new_blocks: Sequence[int]) -> None:
        """Other numbers of new blocks than the plan's. Raises `ValueError` after the first window."""
        if self._num_windows:
            raise ValueError("another ramp after the first window")
        self._ramp = tuple(new_blocks)

    def push(self, codes: Iterable[int]) -> None:
        """New codes, in order."""
        if self._finished:
            raise ValueError("codes after finish()")
        self._codes.extend(codes)

    def finish(self) -> None:
        """No further codes follow."""
        self._finished = True

    @property
    def num_held_codes(self) -> int:
        """Codes that a later window may still need, and those that have not been in a window yet."""
        return len(self._codes)

    def ready(self) -> list[Window]:
        """Windows that have become complete since the last call, in order."""
        windows = []
        if self._plan.mode == "windows":
            while (window := self._next_full_window()) is not None:
                windows.append(window)
        end = self._first_code + len(self._codes)
        if self._finished and self._emitted < end:
            windows.append(self._cut(emit_end=end, end=end, is_last=True))
        return windows

    def _next_full_window(self) -> Window | None:
        new_blocks = self._ramp[min(self._num_windows, len(self._ramp) - 1)]
        emit_end = self._emitted + new_blocks * self._codes_per_block
        end = emit_end + self._plan.future_blocks * self._codes_per_block
        if end > self._first_code + len(self._codes):
            return None
        return self._cut(emit_end=emit_end, end=end, is_last=False)

    def _cut(self, *, emit_end: int, end: int, is_last: bool) -> Window:
        window = Window(
            codes=tuple(self._codes[: end - self._first_code]),
            first_code=self._first_code,
            emit_start=self._emitted,
            emit_end=emit_end,
            vocoder_margin_frames=self._plan.vocoder_margin_frames,
            is_last=is_last,
        )
        self._emitted = emit_end
        self._num_windows += 1
        next_first = max(0, emit_end - self._plan.past_blocks * self._codes_per_block)
        del self._codes[: next_first - self._first_code]
        self._first_code = next_first
        return window
