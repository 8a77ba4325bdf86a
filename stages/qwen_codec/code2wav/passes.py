"""Passes of the network: the next frames of several streams."""

from typing import ClassVar

import torch

from stages.qwen_codec.code2wav.network import Code2WavNetwork
from stages.qwen_codec.code2wav.state import Step, StreamState

MAX_PASS_FRAMES = 64
"""Frames of one stream that an eager pass computes. More, such as the past of a stream that lost its state,
take several passes, which give the same audio and limit the memory."""

PLACE_COLUMNS = 4
"""Slot, position, and numbers of known and of new frames (see `Step`)."""


class Passes:
    """Runs passes of the lengths that it chooses: eagerly, on any device, for batches of any size. How a
    window is cut into passes does not change its audio."""

    pads: ClassVar[bool] = False
    """Whether streams with fewer frames left go along in a longer pass. Eagerly, each frame costs time."""

    def __init__(self, network: Code2WavNetwork, *, num_slots: int, max_frames: int) -> None:
        """A pass has at most `max_frames` frames in total, or one stream. Raises `ConfigError` if memory runs
        out."""
        self.num_slots = num_slots
        """Slots for streams."""
        self.state = StreamState(network, num_slots)
        self._network = network
        self._max_frames = max_frames
        self._device = next(network.parameters()).device

    def length(self, num_frames: int) -> int:
        """Length of the next pass if the longest stream has `num_frames` frames left; both at least 1."""
        return min(num_frames, MAX_PASS_FRAMES)

    def max_num_streams(self, length: int) -> int:
        """Most streams in a pass of this length, at least 1."""
        return max(1, self._max_frames // length)

    def run(self, codes: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns the samples [num_streams, length * samples per frame] as a new tensor on the network's
        device, and changes the streams' state. Samples of padding are undefined. Both arguments are on the
        CPU, int64: `codes` [num_streams, length, codebooks], `places` [num_streams, PLACE_COLUMNS]."""
        return self._compute(codes.to(self._device), places.to(self._device))

    def _compute(self, codes: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Both on the network's device."""
        return self._network(codes, Step(self.state, codes.shape[1], *places.unbind(1)))
