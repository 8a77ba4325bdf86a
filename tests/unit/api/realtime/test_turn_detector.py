"""Where turns begin and end, by scripted probabilities."""

import numpy as np
import numpy.typing as npt
import pytest

from omni_server.api.realtime.vad import FRAME_SAMPLES, Turn, TurnDetector

FRAME_MS = 32


class Scripted:
    def __init__(self, probabilities: list[float]) -> None:
        self._probabilities = iter(probabilities)

    def probability(self, frame: npt.NDArray[np.float32]) -> float:
        assert frame.shape == (FRAME_SAMPLES,)
        return next(self._probabilities)


def turns_of(
    probabilities: list[float], *, threshold: float = 0.5, silence_ms: int = 96, piece: int = 512
) -> list[Turn]:
    detector = TurnDetector(Scripted(probabilities), threshold=threshold, silence_ms=silence_ms)
    samples = np.zeros(len(probabilities) * FRAME_SAMPLES, dtype=np.float32)
    turns: list[Turn] = []
    for begin in range(0, len(samples), piece):
        turns += detector.push(samples[begin : begin + piece])
    return turns


@pytest.mark.parametrize("piece", [1, 160, 512, 777, 100_000])
def test_a_turn_goes_from_the_first_frame_of_speech_to_the_end_of_the_silence(piece: int) -> None:
    turns = turns_of([0, 0, 1, 1, 1, 0, 0, 0, 0], piece=piece)
    assert turns == [Turn("started", 2 * FRAME_MS), Turn("stopped", 8 * FRAME_MS)]


def test_a_click_starts_nothing() -> None:
    assert turns_of([0, 1, 0, 0, 1, 0, 0]) == []


def test_a_pause_does_not_end_a_turn() -> None:
    turns = turns_of([1, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0])
    assert turns == [Turn("started", 0), Turn("stopped", 11 * FRAME_MS)]


def test_between_the_thresholds_speech_goes_on_and_silence_does() -> None:
    assert turns_of([1, 1, 0.4, 0.4, 0.4, 0.4]) == [Turn("started", 0)]
    assert turns_of([1, 1, 0, 0.4, 0.4])[-1] == Turn("stopped", 5 * FRAME_MS)
    assert turns_of([0.4] * 9) == []


def test_the_threshold_is_the_one_asked_for() -> None:
    assert turns_of([0.7] * 5, threshold=0.8) == []
    assert turns_of([0.7] * 5, threshold=0.6) == [Turn("started", 0)]


def test_the_next_turn_starts_anew() -> None:
    kinds = [turn.kind for turn in turns_of([1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0])]
    assert kinds == ["started", "stopped", "started", "stopped"]
