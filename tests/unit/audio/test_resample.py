"""Resampling piece by piece."""

import numpy as np
import numpy.typing as npt
import pytest

from omni_server.audio.filters import Resampler

RATES = [(24_000, 16_000), (8_000, 16_000), (24_000, 8_000), (16_000, 24_000), (16_000, 8_000)]


def tone(hz: float, rate: int, seconds: float = 0.5) -> npt.NDArray[np.float32]:
    return np.sin(2 * np.pi * hz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


@pytest.mark.parametrize(("from_hz", "to_hz"), RATES)
@pytest.mark.parametrize("hz", [100, 1000, 3000])
def test_a_tone_stays_the_tone_that_it_was(from_hz: int, to_hz: int, hz: int) -> None:
    resampler = Resampler(from_hz, to_hz)
    made = np.concatenate([resampler.push(tone(hz, from_hz)), resampler.flush()])
    expected = tone(hz, to_hz)
    assert len(made) == len(expected)
    assert np.abs(made - expected)[100:-100].max() < 1e-3


@pytest.mark.parametrize(("from_hz", "to_hz"), RATES)
def test_pieces_give_what_the_whole_gives(from_hz: int, to_hz: int) -> None:
    sound = np.random.default_rng(1).normal(0, 0.2, 5000).astype(np.float32)
    whole = Resampler(from_hz, to_hz)
    expected = np.concatenate([whole.push(sound), whole.flush()])
    pieces, begin = Resampler(from_hz, to_hz), 0
    made: list[npt.NDArray[np.float32]] = []
    for size in [0, 1, 2, 500, 3, 1, 1000, 3493]:
        made.append(pieces.push(sound[begin : begin + size]))
        begin += size
    made.append(pieces.flush())
    assert begin == len(sound)
    assert np.abs(np.concatenate(made) - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("from_hz", "to_hz", "hz"),
    [(24_000, 16_000, 9500), (24_000, 16_000, 8200), (24_000, 8_000, 5000), (24_000, 8_000, 4100)],
)
def test_what_the_lower_rate_cannot_hold_does_not_fold_back(from_hz: int, to_hz: int, hz: int) -> None:
    made = Resampler(from_hz, to_hz).push(tone(hz, from_hz))
    assert np.abs(made[100:]).max() < 1e-3
