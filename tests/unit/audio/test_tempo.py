"""Speech faster and slower."""

import numpy as np
import numpy.typing as npt
import pytest

from omni_server.audio.filters import TempoFilter

RATE_HZ = 24_000
SPEEDS = (0.25, 0.3, 0.5, 0.8, 1.0, 1.25, 2.0, 3.0, 4.0)

Samples = npt.NDArray[np.float32]


def changed(samples: Samples, speed: float, num_pieces: int) -> Samples:
    tempo = TempoFilter(speed)
    return np.concatenate(
        [*(tempo.push(piece) for piece in np.array_split(samples, num_pieces)), tempo.flush()]
    )


def tone(seconds: float) -> Samples:
    return (0.5 * np.sin(2 * np.pi * 220 * np.arange(int(seconds * RATE_HZ)) / RATE_HZ)).astype(np.float32)


@pytest.mark.parametrize("speed", SPEEDS)
def test_duration_changes_and_pitch_and_level_stay(speed: float) -> None:
    result = changed(tone(2.0), speed, 20)
    assert result.dtype == np.float32
    assert len(result) / RATE_HZ == pytest.approx(2.0 / speed, abs=0.1)
    spectrum = np.abs(np.fft.rfft(result))
    assert spectrum.argmax() * RATE_HZ / len(result) == pytest.approx(220, abs=2.5)
    assert np.sqrt(np.mean(result**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.03)


@pytest.mark.parametrize("speed", SPEEDS)
def test_the_result_does_not_depend_on_how_the_input_is_cut(speed: float) -> None:
    noise = np.random.default_rng(1).uniform(-0.5, 0.5, 30_000).astype(np.float32)
    np.testing.assert_array_equal(changed(noise, speed, 37), changed(noise, speed, 1))


def test_output_comes_while_input_comes() -> None:
    tempo = TempoFilter(1.5)
    pieces = [tempo.push(piece) for piece in np.array_split(tone(2.0), 20)]
    assert sum(map(len, pieces[:10])) > 0.6 * RATE_HZ / 1.5
