"""Where turns begin and end: probabilities of speech, frame by frame, with hysteresis."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from omni_server.api.realtime.vad import FRAME_SAMPLES, VAD_RATE_HZ, SpeechModel

_FRAME_MS = 1000 * FRAME_SAMPLES / VAD_RATE_HZ
_HYSTERESIS = 0.15
"""Silero's: speech ends below the threshold less this, so that it does not flicker."""
_FRAMES_TO_START = 2
"""One frame alone is a click; nobody should be interrupted by one."""
_MIN_SILENCE_FRAMES = 2
"""Makes every turn longer than the 100 ms that models need."""


@dataclass(frozen=True)
class Turn:
    """`ms` counts from the first sample that the detector was given."""

    kind: Literal["started", "stopped"]
    ms: float
    """Of "started": where the first frame of speech begins. Of "stopped": where the silence was long enough."""


class TurnDetector:
    def __init__(self, model: SpeechModel, *, threshold: float, silence_ms: int) -> None:
        self._model = model
        self._threshold = threshold
        self._silence_frames = max(_MIN_SILENCE_FRAMES, round(silence_ms / _FRAME_MS))
        self._rest: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)
        self._num_frames = 0
        self._num_speech = 0
        self._silent_since: int | None = None
        self.is_speaking = False

    def push(self, samples: npt.NDArray[np.float32]) -> list[Turn]:
        """`samples` [num_samples] at `VAD_RATE_HZ`; what does not fill a frame waits for the next call."""
        waiting = np.concatenate([self._rest, samples])
        turns: list[Turn] = []
        position = 0
        while position + FRAME_SAMPLES <= len(waiting):
            turn = self._next(self._model.probability(waiting[position : position + FRAME_SAMPLES]))
            if turn is not None:
                turns.append(turn)
            position += FRAME_SAMPLES
        self._rest = waiting[position:].copy()
        return turns

    def end_turn(self) -> None:
        """Somebody else ended the turn, for example by a commit; the next frames of speech begin a new one."""
        self.is_speaking = False
        self._num_speech = 0
        self._silent_since = None

    def _next(self, probability: float) -> Turn | None:
        self._num_frames += 1
        if self.is_speaking:
            return self._maybe_stop(probability)
        self._num_speech = self._num_speech + 1 if probability >= self._threshold else 0
        if self._num_speech < _FRAMES_TO_START:
            return None
        self.is_speaking = True
        self._silent_since = None
        return Turn("started", (self._num_frames - self._num_speech) * _FRAME_MS)

    def _maybe_stop(self, probability: float) -> Turn | None:
        if probability >= self._threshold:
            self._silent_since = None
        elif probability < self._threshold - _HYSTERESIS and self._silent_since is None:
            self._silent_since = self._num_frames - 1
        if self._silent_since is None or self._num_frames - self._silent_since < self._silence_frames:
            return None
        self.end_turn()
        return Turn("stopped", self._num_frames * _FRAME_MS)
