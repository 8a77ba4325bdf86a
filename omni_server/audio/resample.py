"""Changing the sample rate of a waveform that arrives piece by piece."""

from math import gcd

import numpy as np
import numpy.typing as npt

_ZERO_CROSSINGS = 16
"""Of the sinc, on each side, at the lower of the two rates."""
_ROLLOFF = 0.92
"""Cut-off in units of the lower rate's half: room for the filter to fall before frequencies fold back."""


class Resampler:
    """A windowed-sinc filter that remembers the end of the last piece: the pieces joined are, to float32 rounding,
    what the whole waveform would give at once.

    Meant for the small ratios between 8, 16 and 24 kHz. A tone well inside the band keeps its level to 0.1 dB, and
    one beyond the cut-off is 60 dB down (both tested). `flush` gives the last samples, which still wait for what
    would have followed them.
    """

    def __init__(self, from_hz: int, to_hz: int) -> None:
        divisor = gcd(from_hz, to_hz)
        self._up, self._down = to_hz // divisor, from_hz // divisor
        self._half = _ZERO_CROSSINGS * max(self._up, self._down)  # in samples at the rate between, from_hz * up
        self._phases = _phases(self._up, self._down, self._half)
        self._num_taps = self._phases.shape[1]
        # The first outputs look back to before the beginning.
        self._held: npt.NDArray[np.float32] = np.zeros(self._num_taps - 1, dtype=np.float32)
        self._first_held = -(self._num_taps - 1)
        self._num_in = 0
        self._num_out = 0

    def push(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The output that `samples` [num_samples] complete, [about num_samples * to_hz / from_hz]; may be empty."""
        self._num_in += len(samples)
        return self._push(samples, self._num_in * self._up - self._half)

    def flush(self) -> npt.NDArray[np.float32]:
        """What is left of an output of ceil(all input samples * to_hz / from_hz) samples; nothing may follow."""
        return self._push(np.zeros(self._num_taps, dtype=np.float32), self._num_in * self._up)

    def _push(self, samples: npt.NDArray[np.float32], end: int) -> npt.NDArray[np.float32]:
        """Outputs at positions below `end`, counted at the rate between."""
        self._held = np.concatenate([self._held, samples])
        indices = np.arange(self._num_out, max(self._num_out, -(-end // self._down)))
        if not len(indices):
            return np.zeros(0, dtype=np.float32)
        # Output n is the sum over inputs k of input[k] * filter(n * down - k * up); the newest k comes first.
        newest, phase = np.divmod(indices * self._down + self._half, self._up)
        windows = np.lib.stride_tricks.sliding_window_view(self._held, self._num_taps)
        taken = windows[newest - (self._num_taps - 1) - self._first_held]
        result: npt.NDArray[np.float32] = np.einsum("nt,nt->n", taken, self._phases[phase])
        self._num_out = int(indices[-1]) + 1
        oldest_needed = (self._num_out * self._down + self._half) // self._up - (self._num_taps - 1)
        num_done = min(max(oldest_needed - self._first_held, 0), len(self._held))
        self._held = self._held[num_done:].copy()
        self._first_held += num_done
        return result


def _phases(up: int, down: int, half: int) -> npt.NDArray[np.float32]:
    """The filter cut into `up` rows [up, num_taps], each in the order of the inputs that it meets, oldest first."""
    position = np.arange(-half, half + 1) / max(up, down)
    window = np.kaiser(2 * half + 1, 8.0)
    filter_ = np.sinc(position * _ROLLOFF) * window
    num_taps = -(-(2 * half + 1) // up)
    padded = np.zeros(num_taps * up)
    padded[: len(filter_)] = filter_
    phases = padded.reshape(num_taps, up).T[:, ::-1]
    return np.ascontiguousarray(phases / phases.sum(axis=1, keepdims=True), dtype=np.float32)
