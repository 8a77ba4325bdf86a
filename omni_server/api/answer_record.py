"""What is known about one generation, from its events, for the log and the metrics."""

import time
from collections.abc import Callable
from typing import Literal

from omni_server.errors import OmniError, StageError
from omni_server.types import (
    SAMPLE_RATE_HZ,
    AudioDelta,
    AudioPart,
    Finished,
    OmniEvent,
    OmniRequest,
    PromptTokens,
    TextDelta,
)

Outcome = Literal["running", "ok", "error", "aborted"]


class AnswerRecord:
    """Times are in seconds since the request was submitted, so they include tokenisation and media preprocessing."""

    def __init__(self, request: OmniRequest, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.began = clock()
        """By the clock; all other times count from here."""
        self.answer_id = request.request_id
        self.is_spoken = request.speech is not None
        self.audio_input_s = 0.0 if request.is_another_choice else _audio_s(request)
        self.is_another_choice = request.is_another_choice
        self.sampling = request.sampling
        self.prompt: PromptTokens | None = None
        """None until the request has been admitted."""
        self.admitted_s: float | None = None
        """The stages were given the request."""
        self.first_text_s: float | None = None
        self.first_audio_s: float | None = None
        self.last_audio_s: float | None = None
        self.num_samples = 0
        self.underrun_s = 0.0
        """How long a player would have been silent that began with the first sound and played without a reserve."""
        self._played_until_s = 0.0
        self.finished: Finished | None = None
        self.outcome: Outcome = "running"
        self.reason = ""
        """Why it ended: the finish reason, or the code of the error."""
        self.failed_stage: str | None = None
        self.duration_s = 0.0

    @property
    def audio_s(self) -> float:
        """Seconds of sound that were made."""
        return self.num_samples / SAMPLE_RATE_HZ

    def shortened(self, request: OmniRequest) -> None:
        """The prompt was too long; `request` is tried instead."""
        self.audio_input_s = _audio_s(request)

    def admitted(self, prompt: PromptTokens) -> None:
        self.prompt = prompt
        self.admitted_s = self._now()

    def take(self, event: OmniEvent) -> None:
        """Called for each event, so it does little."""
        match event:
            case TextDelta():
                if self.first_text_s is None and event.token_ids:
                    self.first_text_s = self._now()
            case AudioDelta():
                self._audio(len(event.samples), self._now())
            case Finished():
                self.finished = event
                self._end("ok", event.finish_reason)

    def failed(self, error: Exception) -> None:
        if isinstance(error, StageError):
            self.failed_stage = error.stage
        self._end("error", (error.code or "") if isinstance(error, OmniError) else "internal_error")

    def closed(self) -> None:
        """The caller wants no more; after the end this means nothing."""
        self._end("aborted", "")

    def _audio(self, num_samples: int, now: float) -> None:
        if self.first_audio_s is None:
            self.first_audio_s = self._played_until_s = now
        elif now > self._played_until_s:
            self.underrun_s += now - self._played_until_s
            self._played_until_s = now
        self.last_audio_s = now
        self.num_samples += num_samples
        self._played_until_s += num_samples / SAMPLE_RATE_HZ

    def _end(self, outcome: Outcome, reason: str) -> None:
        if self.outcome == "running":
            self.outcome, self.reason, self.duration_s = outcome, reason, self._now()

    def _now(self) -> float:
        return self._clock() - self.began


def _audio_s(request: OmniRequest) -> float:
    """Seconds of sound that were sent."""
    parts = [part for message in request.messages for part in message.content]
    return sum(len(part.samples) / part.sample_rate_hz for part in parts if isinstance(part, AudioPart))
