"""Samples that come in at one end and are taken at the other."""

from collections import deque

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.int16]


class SampleQueue:
    """Keeps the pieces as they came: joining them with every small piece would copy minutes of sound each time."""

    def __init__(self) -> None:
        self._pieces: deque[Samples] = deque()
        self._num_samples = 0

    def __len__(self) -> int:
        return self._num_samples

    def append(self, samples: Samples) -> None:
        if len(samples):
            self._pieces.append(samples)
            self._num_samples += len(samples)

    def take(self, num_samples: int) -> Samples:
        """The oldest `num_samples`, or all if there are fewer; they are gone from the queue."""
        wanted = min(num_samples, self._num_samples)
        taken: list[Samples] = [np.zeros(0, dtype=np.int16)]
        while wanted:
            piece = self._pieces.popleft()
            if len(piece) > wanted:
                self._pieces.appendleft(piece[wanted:])
                piece = piece[:wanted]
            taken.append(piece)
            wanted -= len(piece)
            self._num_samples -= len(piece)
        return np.concatenate(taken)
