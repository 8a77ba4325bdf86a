"""What was measured of workload W1 on H200s, with the settings of each measurement
(benchmarks/results.csv)."""

from dataclasses import dataclass

_SMALL = ((6, (1, 1, 2, 4, 6, 10)), (18, (2, 2, 4, 6, 8)))
FOUR_WINDOWS = (*_SMALL, (32, (4, 5, 6, 6)))
FIVE_WINDOWS = (*_SMALL, (32, (4, 5, 5, 5, 6)))
"""As shipped. `min_streams` and `new_blocks` of `busy`; among fewer streams 1, 2, 4, 6, 10."""


@dataclass(frozen=True)
class Measured:
    """One line of benchmarks/results.csv."""

    run: str
    settings: str
    callers: int
    distance_s: float
    """Shortest time between the starts of two steps, per stream: the server had it then."""
    pause_s: float
    """Longest pause for a first window."""
    ramps: tuple[tuple[int, tuple[int, ...]], ...]
    first_audio_s: float
    """p50"""
    stall_p99_s: float
    audio_s_per_s: float
    is_calibrated: bool = False
    """The simulator's fitted values were chosen with it."""


_FORECAST, _SETTINGS = "2026-11-23-h200-forecast", "2026-11-23-h200-settings"

MEASURED = (
    Measured(_FORECAST, "5c51652", 1, 0.00021, 0.015, FOUR_WINDOWS, 0.194, 0.0, 7.06, True),
    Measured(_FORECAST, "5c51652", 4, 0.00021, 0.015, FOUR_WINDOWS, 0.242, 0.0, 22.67, True),
    Measured(_SETTINGS, "a0086ce", 8, 0.00023, 0.060, FOUR_WINDOWS, 0.371, 0.0, 34.88, True),
    Measured(_FORECAST, "5c51652", 16, 0.00021, 0.015, FOUR_WINDOWS, 0.477, 0.0, 48.99, True),
    Measured(_SETTINGS, "a0086ce", 32, 0.00023, 0.060, FOUR_WINDOWS, 0.902, 0.0, 61.88, True),
    Measured(_FORECAST, "aa4bd63", 64, 0.00021, 0.015, FIVE_WINDOWS, 1.429, 0.0, 66.95, True),
    Measured(_FORECAST, "5c51652", 64, 0.00021, 0.015, FOUR_WINDOWS, 1.568, 0.0, 69.32),
    Measured(_SETTINGS, "without pauses", 1, 0.00023, 0.0, FOUR_WINDOWS, 0.208, 0.0, 7.30),
    Measured(_SETTINGS, "pauses of 60 ms", 1, 0.00023, 0.060, FOUR_WINDOWS, 0.176, 0.0, 6.87),
    Measured(_SETTINGS, "without pauses", 4, 0.00023, 0.0, FOUR_WINDOWS, 0.255, 0.0, 23.51),
    Measured(_SETTINGS, "without distances", 16, 0.0, 0.060, FOUR_WINDOWS, 0.509, 0.0, 46.23),
    Measured(_SETTINGS, "windows 1, 2, 4, 6, 10", 16, 0.00023, 0.060, (), 0.649, 0.0, 46.33),
    Measured(_SETTINGS, "distance 0.26 ms", 64, 0.00026, 0.060, FOUR_WINDOWS, 1.906, 0.0, 67.82),
    Measured(
        _SETTINGS, "windows 2, 3, 4, 6, 6", 64, 0.00023, 0.060, ((2, (2, 3, 4, 6, 6)),), 1.790, 0.045, 65.46
    ),
)
