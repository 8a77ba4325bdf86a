"""Speech faster or slower at the same pitch, piece by piece, by FFmpeg's `atempo`."""

from collections.abc import Iterator
from fractions import Fraction

import av
import av.filter
import numpy as np
import numpy.typing as npt

from omni_server.types import SAMPLE_RATE_HZ

_SMALLEST, _LARGEST = 0.5, 2.0
"""Of one filter: it refuses less, and beyond that it leaves samples out instead of blending them."""


class TempoFilter:
    """Makes a waveform `speed` times as fast. The pieces that it returns, joined, do not depend on how the input was
    cut, and are as long as the input divided by `speed`, give or take 0.1 s."""

    def __init__(self, speed: float) -> None:
        """`speed`: greater than 0."""
        self._graph = av.filter.Graph()
        nodes = [
            self._graph.add_abuffer(
                sample_rate=SAMPLE_RATE_HZ, format="flt", layout="mono", time_base=Fraction(1, SAMPLE_RATE_HZ)
            ),
            *(self._graph.add("atempo", f"{factor:.6f}") for factor in _factors(speed)),
            self._graph.add("abuffersink"),
        ]
        self._graph.link_nodes(*nodes).configure()
        self._num_samples = 0

    def push(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The output [num_samples], float32, that `samples` [num_samples] complete; may be empty."""
        if not samples.size:
            return samples
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples)[None], format="flt", layout="mono")
        frame.sample_rate = SAMPLE_RATE_HZ
        frame.time_base = Fraction(1, SAMPLE_RATE_HZ)
        frame.pts = self._num_samples
        self._num_samples += samples.size
        self._graph.push(frame)
        return self._output()

    def flush(self) -> npt.NDArray[np.float32]:
        """What is left of the output; nothing may follow."""
        self._graph.push(None)
        return self._output()

    def _output(self) -> npt.NDArray[np.float32]:
        return np.concatenate([np.zeros(0, dtype=np.float32), *self._frames()])

    def _frames(self) -> Iterator[npt.NDArray[np.float32]]:
        while True:
            try:
                frame = self._graph.pull()
            except (av.BlockingIOError, av.EOFError):  # it wants more input; it has had the last
                return
            yield frame.to_ndarray()[0]


def _factors(speed: float) -> list[float]:
    """Their product is `speed`, and each is what one filter can do."""
    factors = []
    while not _SMALLEST <= speed <= _LARGEST:
        factors.append(min(max(speed, _SMALLEST), _LARGEST))
        speed /= factors[-1]
    return [*factors, speed]
