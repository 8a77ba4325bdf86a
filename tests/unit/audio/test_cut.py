"""Long recordings in pieces."""

import numpy as np
import pytest

from omni_server.audio.cut import cut_at_pauses

RATE = 1000


@pytest.mark.parametrize("seconds", [0.1, 5, 30])
def test_what_fits_stays_whole(seconds: float) -> None:
    samples = np.ones(int(seconds * RATE), np.float32)
    (piece,) = cut_at_pauses(samples, RATE, 30)
    assert piece.size == samples.size


@pytest.mark.parametrize("num_samples", [30_001, 30_999, 31_000, 45_678, 60_000, 60_001, 123_456])
def test_pieces_are_consecutive_and_neither_too_long_nor_too_short(num_samples: int) -> None:
    samples = np.random.default_rng(num_samples).standard_normal(num_samples).astype(np.float32)
    pieces = cut_at_pauses(samples, RATE, 30)
    np.testing.assert_array_equal(np.concatenate(pieces), samples)
    assert all(RATE <= len(piece) <= 30 * RATE for piece in pieces)


def test_the_cut_is_in_the_pause() -> None:
    samples = np.ones(50 * RATE, np.float32)
    samples[25 * RATE : 26 * RATE] = 0
    first, rest = cut_at_pauses(samples, RATE, 30)
    assert 25 * RATE < len(first) < 26 * RATE
    assert len(first) + len(rest) == 50 * RATE
