import random

import pytest

from benchmarks.serving.client import SAMPLE_RATE_HZ
from benchmarks.serving.exchange import AudioArrival, Playback, play


def arrivals(*pieces: tuple[float, float]) -> list[AudioArrival]:
    """Of (time, seconds of audio)."""
    return [AudioArrival(time_s, round(seconds * SAMPLE_RATE_HZ)) for time_s, seconds in pieces]


def test_audio_that_comes_in_time_is_played_without_a_stop() -> None:
    assert play(arrivals((5.0, 1.0), (5.9, 1.0), (6.0, 3.0), (9.9, 1.0))) == Playback(0.0, 0)


def test_a_player_stands_still_from_when_it_runs_out_until_the_next_piece() -> None:
    playback = play(arrivals((0.0, 1.0), (1.5, 1.0)))

    assert playback.underrun_s == pytest.approx(0.5)
    assert playback.stalls == 1


def test_a_stop_delays_all_that_follows() -> None:
    # Plays 0 to 1, waits to 1.5, plays to 2.5; without the first stop it would have run out at 2.0 already.
    playback = play(arrivals((0.0, 1.0), (1.5, 1.0), (2.4, 1.0), (4.0, 1.0)))

    assert playback.underrun_s == pytest.approx(0.5 + 0.5)
    assert playback.stalls == 2


def test_the_sample_that_comes_just_when_it_is_due_causes_no_stop() -> None:
    assert play([AudioArrival(0.0, 12_000), AudioArrival(0.5, 1)]) == Playback(0.0, 0)


def test_many_small_pieces_that_come_exactly_in_time_cause_no_stop() -> None:
    step = 480
    pieces = [AudioArrival(number * step / SAMPLE_RATE_HZ, step) for number in range(10_000)]

    assert play(pieces) == Playback(0.0, 0)


def test_one_piece_or_none_never_stops() -> None:
    assert play(arrivals((3.0, 0.1))) == play([]) == Playback(0.0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_player_that_counts_sample_by_sample_stands_still_as_long(seed: int) -> None:
    rng = random.Random(seed)
    time_in_samples, pieces = 0, []
    for _ in range(30):
        time_in_samples += rng.randrange(0, 400)
        pieces.append((time_in_samples, rng.randrange(1, 300)))

    buffered, waited, started, position = 0, 0, False, 0
    for now in range(time_in_samples + 1):
        while position < len(pieces) and pieces[position][0] == now:
            buffered += pieces[position][1]
            started, position = True, position + 1
        if started and buffered:
            buffered -= 1
        elif started and position < len(pieces):
            waited += 1

    playback = play([AudioArrival(when / SAMPLE_RATE_HZ, samples) for when, samples in pieces])
    assert playback.underrun_s * SAMPLE_RATE_HZ == pytest.approx(waited)
