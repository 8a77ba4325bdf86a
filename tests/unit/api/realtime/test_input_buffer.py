"""The input buffer, with a detector that hears whatever is loud."""

import numpy as np
import numpy.typing as npt
import pytest

from omni_server.api.realtime.input_buffer import InputBuffer, Started, Stopped
from omni_server.api.realtime.session_config import G711Format, PcmFormat, ServerVad, TurnDetection
from omni_server.errors import InvalidRequestError
from tests.unit.api.realtime.realtime_client import ScriptedModel, silence, voice

Samples = npt.NDArray[np.int16]


def buffer_of(turn_detection: TurnDetection | None, max_s: float = 300) -> InputBuffer:
    buffer = InputBuffer(ScriptedModel, max_s)
    buffer.configure(PcmFormat(), turn_detection)
    return buffer


def pcm(*parts: npt.NDArray[np.float32]) -> Samples:
    return np.rint(np.concatenate(parts) * 32767).astype(np.int16)


def test_a_buffer_that_is_full_takes_nothing_more_and_keeps_what_it_has() -> None:
    buffer = buffer_of(None, max_s=1.0)
    list(buffer.append(pcm(voice(0.9))))
    with pytest.raises(InvalidRequestError, match="at most 1 s"):
        list(buffer.append(pcm(voice(0.2))))
    assert len(buffer.commit()) == 0.9 * 24_000


def test_padding_never_reaches_into_the_turn_before() -> None:
    buffer = buffer_of(ServerVad(prefix_padding_ms=2000, silence_duration_ms=200))
    turns = list(buffer.append(pcm(voice(0.5), silence(0.3), voice(0.5), silence(0.3))))
    first, second = turns[1], turns[2]
    assert isinstance(first, Stopped)
    assert isinstance(second, Started)
    assert second.audio_start_ms == pytest.approx(first.audio_end_ms, abs=1)


def test_an_hour_of_silence_is_not_kept() -> None:
    buffer = buffer_of(ServerVad())
    minute = pcm(silence(20))
    for _ in range(6):
        assert list(buffer.append(minute)) == []
    assert buffer.seconds <= 30


def test_who_never_stops_speaking_is_cut_at_the_longest_turn() -> None:
    buffer = buffer_of(ServerVad(), max_s=5.0)
    turns = list(buffer.append(pcm(voice(11))))
    assert [type(turn) for turn in turns] == [Started, Stopped, Started, Stopped, Started]
    assert all(len(turn.samples) <= 5 * 24_000 for turn in turns if isinstance(turn, Stopped))


def test_a_commit_ends_the_turn_that_is_being_spoken() -> None:
    buffer = buffer_of(ServerVad())
    assert [type(turn) for turn in buffer.append(pcm(voice(1)))] == [Started]
    assert len(buffer.commit()) == pytest.approx(24_000, abs=10)
    assert list(buffer.append(pcm(silence(2)))) == []


def test_times_go_on_when_the_settings_change() -> None:
    buffer = buffer_of(None)
    list(buffer.append(pcm(voice(1))))
    buffer.clear()
    buffer.configure(G711Format(type="audio/pcmu"), ServerVad(prefix_padding_ms=0))
    at_8_khz = pcm(silence(1))[::3]
    list(buffer.append(at_8_khz))
    (started,) = buffer.append(pcm(voice(1))[::3])
    assert isinstance(started, Started)
    assert abs(started.audio_start_ms - 2000) <= 40


def test_the_same_settings_again_change_nothing() -> None:
    buffer = buffer_of(ServerVad())
    assert [type(turn) for turn in buffer.append(pcm(voice(1)))] == [Started]
    buffer.configure(PcmFormat(), ServerVad())
    assert [type(turn) for turn in buffer.append(pcm(silence(1)))] == [Stopped]
