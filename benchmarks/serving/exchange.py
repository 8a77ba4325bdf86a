"""One request and its streamed answer: arrival times, and playback by a simulated player."""

import base64
import io
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp
from PIL import Image, UnidentifiedImageError

from benchmarks.serving.client import (
    SAMPLE_RATE_HZ,
    Chunk,
    ImageEvent,
    StreamError,
    Usage,
    stream_bytes,
    stream_events,
)
from benchmarks.serving.results import RequestRow
from benchmarks.serving.workload import Workload

_DONE = b"[DONE]"
_BYTES_PER_SAMPLE = 2
_MAX_FAILURE_CHARS = 220
"""Per failure reason in the results."""


@dataclass(frozen=True)
class AudioArrival:
    """One piece of received audio."""

    time_s: float
    """Arrival time in seconds, on any one clock."""
    samples: int
    """Number of samples at 24 kHz."""


@dataclass(frozen=True)
class Playback:
    underrun_s: float
    """Total time that the player stalled after it had started."""
    stalls: int


def play(arrivals: Sequence[AudioArrival]) -> Playback:
    """Simulates a player without a playout buffer: it starts with the first arrival, stalls when it runs out
    of samples, and resumes with the next arrival. `arrivals`: in time order, none empty."""
    if not arrivals:
        return Playback(underrun_s=0.0, stalls=0)
    # Counted as integers since the last stall: float sums would show stalls in a stream without any.
    playing_since_s, samples = arrivals[0].time_s, arrivals[0].samples
    underrun_s, stalls = 0.0, 0
    for arrival in arrivals[1:]:
        runs_out_s = playing_since_s + samples / SAMPLE_RATE_HZ
        if arrival.time_s > runs_out_s:
            underrun_s += arrival.time_s - runs_out_s
            stalls += 1
            playing_since_s, samples = arrival.time_s, 0
        samples += arrival.samples
    return Playback(underrun_s, stalls)


@dataclass
class SpeechAnswer:
    """The samples of an answer so far; times are on the clock of `time.perf_counter`."""

    workload: Workload
    sample_tolerance: int
    arrivals: list[AudioArrival] = field(default_factory=list)
    audio_bytes: int = 0

    @property
    def samples(self) -> int:
        return self.audio_bytes // _BYTES_PER_SAMPLE

    def add(self, data: bytes, arrived_s: float) -> None:
        before = self.samples
        self.audio_bytes += len(data)
        if self.samples > before:
            self.arrivals.append(AudioArrival(arrived_s, self.samples - before))

    def check(self) -> None:
        """Raises `StreamError` if the answer does not have the requested length."""
        if self.audio_bytes % _BYTES_PER_SAMPLE:
            raise StreamError("half a sample at the end of the audio")
        if abs(self.samples - self.workload.expected_samples) > self.sample_tolerance:
            raise StreamError(f"{self.samples} samples instead of {self.workload.expected_samples}")

    def measured(self, row: RequestRow, began_s: float) -> RequestRow:
        """Returns `row` with what was measured. The request was sent at `began_s`."""
        playback = play(self.arrivals)
        return row.model_copy(
            update={
                "ttfa_s": self.arrivals[0].time_s - began_s if self.arrivals else None,
                "audio_gaps_s": [later.time_s - earlier.time_s for earlier, later in pairwise(self.arrivals)],
                "samples": self.samples,
                "underrun_s": playback.underrun_s,
                "stalls": playback.stalls,
            }
        )


@dataclass
class ChatAnswer(SpeechAnswer):
    """With or without speech."""

    is_done: bool = False
    first_text_s: float | None = None
    text_deltas: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None

    def add(self, data: bytes, arrived_s: float) -> None:
        """Adds one event. Raises `StreamError` if it is malformed or reports an error."""
        self.is_done = self.is_done or data == _DONE
        if self.is_done:
            return
        chunk = Chunk.parse(data)
        if chunk.text:
            self.text_deltas += 1
            if self.first_text_s is None:
                self.first_text_s = arrived_s
        super().add(chunk.samples, arrived_s)
        self.finish_reason = chunk.finish_reason or self.finish_reason
        # Some servers repeat the usage in every chunk, with zeros in chunks of audio.
        if chunk.usage is not None and (
            self.usage is None or chunk.usage.text_tokens >= self.usage.text_tokens
        ):
            self.usage = chunk.usage

    def check(self) -> None:
        """Raises `StreamError` if the answer is incomplete, too."""
        if not self.is_done:
            raise StreamError("the stream ended without [DONE]")
        if self.usage is None:
            raise StreamError("no usage in the stream")
        if self.usage.text_tokens != self.workload.text_tokens:
            raise StreamError(f"{self.usage.text_tokens} text tokens instead of {self.workload.text_tokens}")
        super().check()
        codec = self.usage.codec_tokens
        spoken = (codec or 0) * self.workload.samples_per_codec_token
        if codec is not None and abs(self.samples - spoken) > self.sample_tolerance:
            raise StreamError(f"{self.samples} samples, while usage has {codec} codec tokens")

    def measured(self, row: RequestRow, began_s: float) -> RequestRow:
        return (
            super()
            .measured(row, began_s)
            .model_copy(
                update={
                    "ttft_s": self.first_text_s - began_s if self.first_text_s is not None else None,
                    "text_deltas": self.text_deltas,
                    "finish_reason": self.finish_reason,
                    **(self.usage.counts() if self.usage is not None else {}),
                }
            )
        )


@dataclass
class ImageAnswer:
    """The answer so far; times are on the clock of `time.perf_counter`."""

    workload: Workload
    previews_s: list[float] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    def add(self, data: bytes, arrived_s: float) -> None:
        """Adds one event. Raises `StreamError` if it is malformed or reports an error."""
        event = ImageEvent.parse(data)
        match event.type:
            case "image_generation.partial_image":
                self.previews_s.append(arrived_s)
            case "image_generation.completed":
                self.images.append(event.b64_json)

    def check(self) -> None:
        """Raises `StreamError` if the answer is not one PNG of the requested size."""
        if len(self.images) != 1:
            raise StreamError(f"{len(self.images)} images instead of 1")
        size = _png_size(self.images[0])
        if self.workload.size not in (None, size):
            raise StreamError(f"an image of {size} instead of {self.workload.size}")

    def measured(self, row: RequestRow, began_s: float) -> RequestRow:
        """Returns `row` with what was measured. The request was sent at `began_s`."""
        preview_s = self.previews_s[0] - began_s if self.previews_s else None
        return row.model_copy(update={"preview_s": preview_s, "previews": len(self.previews_s)})


def _png_size(encoded: str) -> str:
    """Returns the size of a PNG in base64, as in "1024x1024". Raises `StreamError`."""
    try:
        with Image.open(io.BytesIO(base64.b64decode(encoded, validate=True)), formats=["PNG"]) as image:
            return f"{image.width}x{image.height}"
    except UnidentifiedImageError as error:
        raise StreamError("an image that is not a PNG") from error
    except ValueError as error:
        raise StreamError("an image that is not base64") from error


@dataclass(frozen=True)
class PreparedRequest:
    index: int
    body: bytes
    workload: Workload


@dataclass(frozen=True)
class Client:
    """Sends requests to one server."""

    session: aiohttp.ClientSession
    url: str
    sample_tolerance: int
    timeout_s: int

    async def send(self, request: PreparedRequest, level_began_s: float) -> RequestRow:
        """Reports failures in the row. `level_began_s`: on the clock of `time.perf_counter`."""
        workload = request.workload
        answer: SpeechAnswer | ImageAnswer = ChatAnswer(workload, self.sample_tolerance)
        stream = stream_events
        if workload.makes_images:
            answer = ImageAnswer(workload)
        elif workload.reads_aloud:
            answer, stream = SpeechAnswer(workload, self.sample_tolerance), stream_bytes
        failure = None
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        began_s = time.perf_counter()
        try:
            async with aclosing(stream(self.session, self.url, request.body, timeout)) as parts:
                async for data, arrived_s in parts:
                    answer.add(data, arrived_s)
            end_s = time.perf_counter()
            answer.check()
        except StreamError as error:
            failure, end_s = str(error)[:_MAX_FAILURE_CHARS], time.perf_counter()
        except TimeoutError:
            failure, end_s = f"not answered within {self.timeout_s} s", time.perf_counter()
        row = RequestRow(
            index=request.index, sent_s=began_s - level_began_s, failure=failure, end_to_end_s=end_s - began_s
        )
        return answer.measured(row, began_s)
