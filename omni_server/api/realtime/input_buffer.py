"""Buffers client audio that has not become an item yet, and finds the turns in it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from omni_server.api.realtime.audio_format import Samples
from omni_server.api.realtime.session_config import TurnDetection, WireFormat
from omni_server.api.realtime.vad import VAD_RATE_HZ, SpeechModel, TurnDetector
from omni_server.audio.filters import Resampler
from omni_server.errors import InvalidRequestError

_MIN_COMMIT_MS = 100
_QUIET_S = 30.0
"""Seconds without speech kept under turn detection, for clients that commit themselves."""


@dataclass(frozen=True)
class Started:
    audio_start_ms: int
    """Since the session's first sample; includes the prefix padding."""


@dataclass(frozen=True)
class Stopped:
    audio_end_ms: int
    samples: Samples
    """The turn [num_samples], from the prefix padding to the end of the silence."""


class InputBuffer:
    """Times count all audio ever appended in this session, in ms."""

    def __init__(self, new_model: Callable[[], SpeechModel], max_s: float) -> None:
        """A turn ends after `max_s` seconds, even if the user is still speaking."""
        self._new_model = new_model
        self._max_s = max_s
        self._rate = 0
        self._samples = bytearray()
        """16-bit. A bytearray grows at its end and shrinks at its beginning without a full copy."""
        self._begin_ms = 0.0
        """Time of the first sample in the buffer."""
        self._detector: TurnDetector | None = None
        self._detector_begin_ms = 0.0
        self._resampler: Resampler | None = None
        self._padding_ms = 0
        self._configured: tuple[WireFormat, TurnDetection | None] | None = None

    def configure(self, format: WireFormat, turn_detection: TurnDetection | None) -> None:
        """A new format empties the buffer; new turn detection starts a new detector."""
        if self._configured == (format, turn_detection):
            return
        if self._configured is None or self._configured[0] != format:
            self._take(self._num_samples)
            self._rate = format.rate_hz
        self._configured = (format, turn_detection)
        self._detector = None
        if turn_detection is not None:
            self._detector = TurnDetector(
                self._new_model(), threshold=turn_detection.threshold, silence_ms=turn_detection.silence_ms
            )
            self._padding_ms = turn_detection.prefix_padding_ms
            self._resampler = Resampler(self._rate, VAD_RATE_HZ)
            self._detector_begin_ms = self._end_ms

    @property
    def seconds(self) -> float:
        return self._num_samples / self._rate

    @property
    def _num_samples(self) -> int:
        return len(self._samples) // 2

    def append(self, samples: Samples) -> Iterator[Started | Stopped]:
        """Appends `samples` [num_samples] and yields turns as they are found; iterate to the end.

        Takes 5 ms per second of audio. Raises `InvalidRequestError`, with nothing appended, if the buffer
        would grow beyond the longest turn.
        """
        if self._detector is None and self.seconds + len(samples) / self._rate > self._max_s:
            raise InvalidRequestError(
                f"The input audio buffer holds at most {self._max_s:g} s: commit or clear it.",
                param="audio",
                code="input_audio_buffer_full",
            )
        # One second at a time, so that turns are cut where they end.
        for begin in range(0, len(samples), self._rate):
            yield from self._append_second(samples[begin : begin + self._rate])

    def commit(self) -> Samples:
        """Returns all buffered audio and empties the buffer. Raises `InvalidRequestError` for too little."""
        if self.seconds * 1000 < _MIN_COMMIT_MS:
            raise InvalidRequestError(
                "Error committing input audio buffer: buffer too small. Expected at least "
                f"{_MIN_COMMIT_MS}ms of audio, but buffer only has {self.seconds * 1000:.2f}ms of audio.",
                code="input_audio_buffer_commit_empty",
            )
        if self._detector is not None:
            self._detector.end_turn()
        return self._take(self._num_samples)

    def clear(self) -> None:
        if self._detector is not None:
            self._detector.end_turn()
        self._take(self._num_samples)

    @property
    def _end_ms(self) -> float:
        return self._begin_ms + (1000 * self.seconds if self._rate else 0.0)

    def _append_second(self, samples: Samples) -> Iterator[Started | Stopped]:
        self._samples += samples.tobytes()
        if self._detector is None or self._resampler is None:
            return
        heard = self._resampler.push(samples.astype(np.float32) / np.float32(32768.0))
        for turn in self._detector.push(heard):
            ms = self._detector_begin_ms + turn.ms
            if turn.kind == "started":
                self._take(self._index(ms - self._padding_ms))
                yield Started(round(self._begin_ms))
            else:
                yield Stopped(round(ms), self._take(self._index(ms)))
        if self._detector.is_speaking and self.seconds >= self._max_s - 1:
            self._detector.end_turn()
            yield Stopped(round(self._end_ms), self._take(self._num_samples))
        elif not self._detector.is_speaking and self.seconds > _QUIET_S:
            self._take(self._num_samples - int(_QUIET_S * self._rate))

    def _index(self, ms: float) -> int:
        return min(max(round((ms - self._begin_ms) * self._rate / 1000), 0), self._num_samples)

    def _take(self, num_samples: int) -> Samples:
        self._begin_ms += 1000 * num_samples / self._rate if num_samples else 0.0
        taken = np.frombuffer(self._samples[: 2 * num_samples], dtype=np.int16)
        del self._samples[: 2 * num_samples]
        return taken
