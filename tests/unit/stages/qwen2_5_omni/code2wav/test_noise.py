"""Noise by absolute mel frame."""

import numpy as np
import pytest

from stages.qwen2_5_omni.code2wav.noise import noise_frames


@pytest.mark.parametrize(
    ("first", "number"), [(0, 1), (5, 19), (23, 2), (24, 24), (47, 60), (200, 100), (299, 1)]
)
def test_a_row_depends_on_the_seed_and_the_frame_only(first: int, number: int) -> None:
    whole = noise_frames(7, 0, 300, 80)
    np.testing.assert_array_equal(noise_frames(7, first, number, 80), whole[first : first + number])


def test_is_standard_normal() -> None:
    noise = noise_frames(1, 0, 2400, 80)
    assert noise.dtype == np.float32
    assert np.isfinite(noise).all()
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    assert abs((np.abs(noise) > 1.96).mean() - 0.05) < 0.002
    assert abs((noise**4).mean() - 3) < 0.1


def test_rows_and_seeds_are_uncorrelated() -> None:
    first, second = noise_frames(1, 0, 2400, 80), noise_frames(2, 0, 2400, 80)
    for a, b in (
        (first, second),
        (first[:-1], first[1:]),
        (first[:-24], first[24:]),
        (first[:, :40], first[:, 40:]),
    ):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


def test_stays_the_same_for_ever() -> None:
    """A recorded request must sound the same after an upgrade."""
    np.testing.assert_allclose(
        noise_frames(42, 24, 1, 4)[0], [0.6951521, 0.6050294, -0.8683695, -0.3359339], rtol=1e-6
    )
