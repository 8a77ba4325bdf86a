"""How codec tokens are cut into windows, and when windows and audio are sent."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from omni_server.config.frozen_model import FrozenModel


def _as_ramp(value: object) -> object:
    """A single number becomes a ramp of one."""
    if value in ([], ()):
        raise ValueError(
            "must hold at least one number"
        )  # as a length of the tuple it would follow every other error
    return (value,) if isinstance(value, int) else value


Ramp = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_as_ramp)]


def output_ends(sizes: Sequence[int]) -> Iterator[int]:
    """How much has been sent after each output; the last size applies to all further ones."""
    return itertools.accumulate(itertools.chain(sizes, itertools.repeat(sizes[-1])))


class BusyChunks(FrozenModel):
    """Other windows for utterances that begin while other streams are active.

    First audio is held until the window after it is expected in time. With a few active streams that window
    would be late, and a shorter second window lets first audio leave earlier. With many, short windows only
    add work for which first audio would have to wait.
    """

    min_streams: Annotated[int, Field(ge=2)]
    """Smallest number of active streams for these windows. Requests that have not begun to speak count."""
    new_blocks: Ramp
    """As in `chunks`."""


def _as_list(value: object) -> object:
    """A mapping becomes a list of one, `null` an empty list."""
    if value is None:
        return ()
    return (value,) if isinstance(value, dict) else value


class ChunkPlan(FrozenModel):
    """How frames of codec tokens are cut into windows for the decoder.

    Windows are counted in blocks of `CodecLayout.frames_per_block` frames. A family whose decoder needs
    further options extends this class and passes an instance to `EdgeSpec.chunks`.
    """

    mode: Literal["windows", "whole"] = "windows"
    """`windows`: each window is sent as soon as its frames are available. `whole`: one pass over the whole
    utterance after its last frame, without streaming."""
    carry: bool = True
    """`true`: a window begins where the previous one ended, with the state that the decoder kept. `false`,
    and if the state was lost: it computes `past_blocks` again. No effect in mode `whole`."""
    past_blocks: Annotated[int, Field(ge=0)] = 2
    """Blocks before the new ones that a window computes again if no state was kept."""
    new_blocks: Ramp = (1, 1, 2, 4, 8)
    """Number of new blocks in the first window, in the second and so on; the last number applies to all
    further windows. A single number applies to all windows."""
    busy: Annotated[tuple[BusyChunks, ...], BeforeValidator(_as_list)] = ()
    """Other values of `new_blocks` when several streams are active, in ascending order of `min_streams`; the
    last entry that applies is used. A single entry needs no list. No effect in mode `whole`."""
    future_blocks: Annotated[int, Field(ge=0)] = 1
    """Blocks after the new ones that a window waits for and uses as context."""
    max_start_delay_s: Annotated[float, Field(ge=0, le=10)] = 10.0
    """Longest time in seconds that the first audio of a stream is held in the playout buffer until the buffer
    covers the expected turnaround of the later windows, and what is missing if speech is generated more
    slowly than it is played; 0: first audio is never held."""

    @model_validator(mode="after")
    def _check(self) -> "ChunkPlan":
        least = [busy.min_streams for busy in self.busy]
        if any(before >= after for before, after in itertools.pairwise(least)):
            raise ValueError(f"busy must be in ascending order of min_streams, but they are {least}")
        return self

    @property
    def carries_state(self) -> bool:
        """Windows are parts of a stream, computed one after the other."""
        return self.mode == "windows" and self.carry

    @property
    def max_outstanding_windows(self) -> int:
        """Windows of one stream that may be in the decoder at once."""
        return 1 if self.carries_state else 2

    def blocks_per_output(self, *, may_pause: bool) -> tuple[int, ...]:
        """Blocks of frames in each output of the source; the last number applies to all further ones. An
        output has what the next window still needs, or one block if the windows are not known before: they
        may depend on other streams, and end early where the source `may_pause`."""
        if may_pause or self.mode == "whole" or self.busy:
            return (1,)
        first, *further = self.new_blocks
        return (first + self.future_blocks, *(further or self.new_blocks))

    @property
    def longest_window_blocks(self) -> int | None:
        """Blocks of the longest window that this plan can cut; None in mode `whole`, where it is the
        utterance."""
        if self.mode == "whole":
            return None
        ramps = [self.new_blocks, *(busy.new_blocks for busy in self.busy)]
        return self.past_blocks + max(map(max, ramps)) + self.future_blocks
