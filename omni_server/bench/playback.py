"""A player that plays speech while it arrives."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SAMPLE_RATE = 24_000


@dataclass(frozen=True)
class AudioArrival:
    """A piece of sound."""

    time_s: float
    """When it was there, in seconds on any one clock."""
    samples: int
    """How many at 24 kHz."""


@dataclass(frozen=True)
class Playback:
    underrun_s: float
    """How long the player stood still after it had begun, in total."""
    stalls: int
    """How often it stood still."""


def play(arrivals: Sequence[AudioArrival]) -> Playback:
    """Plays from the first arrival on, without any buffer in advance; where it runs out of samples it waits for the
    next piece and goes on at once. `arrivals` are in order of time and hold at least one sample each."""
    if not arrivals:
        return Playback(underrun_s=0.0, stalls=0)
    # Samples are counted as integers since the last stall: sums of floats would see stalls in a stream without any.
    playing_since_s, samples = arrivals[0].time_s, arrivals[0].samples
    underrun_s, stalls = 0.0, 0
    for arrival in arrivals[1:]:
        runs_out_s = playing_since_s + samples / SAMPLE_RATE
        if arrival.time_s > runs_out_s:
            underrun_s += arrival.time_s - runs_out_s
            stalls += 1
            playing_since_s, samples = arrival.time_s, 0
        samples += arrival.samples
    return Playback(underrun_s, stalls)


def gaps(arrivals: Sequence[AudioArrival]) -> list[float]:
    """Seconds between each piece of sound and the next."""
    return [later.time_s - earlier.time_s for earlier, later in pairwise(arrivals)]
