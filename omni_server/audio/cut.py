"""Splits long recordings into pieces that fit a model."""

import numpy as np
import numpy.typing as npt

_FRAME_SECONDS = 0.1
_SHORTEST_SECONDS = 1.0


def cut_at_pauses(
    samples: npt.NDArray[np.float32], sample_rate_hz: int, max_seconds: float
) -> list[npt.NDArray[np.float32]]:
    """Splits `samples` [num_samples] into consecutive pieces of at most `max_seconds`, which must be at least
    3.

    Cuts in the middle of the quietest 0.1 s of a piece's last third, where speech most likely pauses. Only a
    single piece may be shorter than a second.
    """
    longest, shortest = int(max_seconds * sample_rate_hz), int(_SHORTEST_SECONDS * sample_rate_hz)
    pieces: list[npt.NDArray[np.float32]] = []
    start = 0
    while len(samples) - start > longest:
        end = min(start + longest, len(samples) - shortest)
        cut = _quietest(samples, start + longest * 2 // 3, end, int(_FRAME_SECONDS * sample_rate_hz))
        pieces.append(samples[start:cut])
        start = cut
    return [*pieces, samples[start:]]


def _quietest(samples: npt.NDArray[np.float32], first: int, end: int, frame: int) -> int:
    """Returns the middle of the frame with the least energy between `first` and `end`."""
    num_frames = (end - first) // frame
    frames = samples[first : first + num_frames * frame].reshape(num_frames, frame)
    energy = np.einsum("ij,ij->i", frames, frames)
    return first + int(energy.argmin()) * frame + frame // 2
