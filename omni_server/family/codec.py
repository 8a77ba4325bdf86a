"""How codec tokens become audio: frames, and the windows that an edge cuts them into for the decoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.types import SAMPLE_RATE_HZ


@dataclass(frozen=True)
class CodecLayout:
    """How frames of codec tokens relate to audio. A frame has one token per codebook."""

    frames_per_block: int
    """Frames in a block, the unit in which `ChunkPlan` counts: windows begin on multiples of it."""
    samples_per_frame: int
    """Samples per frame of the decoder's waveform."""
    sample_rate_hz: int = SAMPLE_RATE_HZ
    """Sample rate of the decoder's waveform. Divided by `samples_per_frame`, it is the frame rate."""
    lead_samples: int = 0
    """Samples by which the waveform is ahead of its frames: frame f begins at sample f * `samples_per_frame`
    - `lead_samples`, the first frame is that much shorter, and so is the whole stream."""

    def __post_init__(self) -> None:
        # Otherwise a window of one frame might have no audio.
        if not 0 <= self.lead_samples < self.samples_per_frame:
            raise ValueError(
                f"lead_samples is {self.lead_samples}; it must be less than samples_per_frame, "
                f"{self.samples_per_frame}, and not negative"
            )

    def first_sample(self, frame: int) -> int:
        """Where the audio of frame number `frame` begins. For the number of frames in a stream, the number of
        samples in it."""
        return max(0, frame * self.samples_per_frame - self.lead_samples)


@dataclass(frozen=True)
class DecoderWindow:
    """One piece of work for the codec decoder; the result is the waveform from `first_sample` on."""

    token_ids: tuple[int, ...]
    """The frames of the window, concatenated."""
    payload: bytes
    """The stage's encoded input; see the family's edge."""
    first_sample: int
    num_samples: int
    num_computed: int
    """Frames to compute if the decoder has kept the state of earlier frames."""
    is_varied: bool
    """The frames whose audio is requested are not all equal."""


Frame = tuple[int, ...]
"""The codec tokens of one frame, one per codebook."""


class CodecEdge(Protocol):
    """Cuts the codec tokens of one speech stream into contiguous windows, in order."""

    def use_ramp(self, new_blocks: Sequence[int]) -> None:
        """Replace the plan's numbers of new blocks per window. Call it before the first window."""
        ...

    def push(self, frames: Sequence[Frame]) -> list[DecoderWindow]:
        """Adds frames; returns the windows now complete."""
        ...

    def flush(self) -> list[DecoderWindow]:
        """The frames pause: returns a window of those that can be decoded without more. After it, the numbers
        of new blocks begin anew."""
        ...

    def finish(self) -> list[DecoderWindow]:
        """Ends the stream; returns the remaining windows."""
        ...


class CodecEdgeFactory(Protocol):
    """The edge function itself."""

    def __call__(
        self, plan: ChunkPlan, layout: CodecLayout, *, voice: str, noise_seed: int, past: Sequence[Frame] = ()
    ) -> CodecEdge:
        """`past`: frames that the stream continues, whose audio is not wanted. Raises `ConfigError` if the
        plan does not fit the model."""
        ...
