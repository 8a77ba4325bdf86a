"""One request and its streamed answer: arrival times, and playback by a simulated player."""

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp

from omni_server.bench.results import RequestRow
from omni_server.bench.workload import Workload
from omni_server.client.stream import SAMPLE_RATE_HZ, Chunk, StreamError, Usage, stream_chunks

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
    # Samples since the last stall are counted as integers: float sums would show stalls in a stream without
    # any.
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


def gaps(arrivals: Sequence[AudioArrival]) -> list[float]:
    """Returns the seconds between consecutive arrivals."""
    return [later.time_s - earlier.time_s for earlier, later in pairwise(arrivals)]


@dataclass(frozen=True)
class PreparedRequest:
    index: int
    body: bytes


@dataclass
class _Answer:
    """The answer so far; times are on the clock of `time.perf_counter`."""

    first_text_s: float | None = None
    text_deltas: int = 0
    arrivals: list[AudioArrival] = field(default_factory=list)
    audio_bytes: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None

    @property
    def samples(self) -> int:
        return self.audio_bytes // _BYTES_PER_SAMPLE

    def add(self, chunk: Chunk, now_s: float) -> None:
        if chunk.text:
            self.text_deltas += 1
            if self.first_text_s is None:
                self.first_text_s = now_s
        before = self.samples
        self.audio_bytes += len(chunk.samples)
        if self.samples > before:
            self.arrivals.append(AudioArrival(now_s, self.samples - before))
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
        # Some servers repeat the usage in every chunk, with zeros in chunks of audio.
        if chunk.usage is not None and (
            self.usage is None or chunk.usage.text_tokens >= self.usage.text_tokens
        ):
            self.usage = chunk.usage

    def check(self, workload: Workload, sample_tolerance: int) -> None:
        """Raises `StreamError` if the answer does not have the requested length."""
        if self.usage is None:
            raise StreamError("no usage in the stream")
        if self.usage.text_tokens != workload.text_tokens:
            raise StreamError(f"{self.usage.text_tokens} text tokens instead of {workload.text_tokens}")
        if self.audio_bytes % _BYTES_PER_SAMPLE:
            raise StreamError("half a sample at the end of the audio")
        if abs(self.samples - workload.expected_samples) > sample_tolerance:
            raise StreamError(f"{self.samples} samples instead of {workload.expected_samples}")
        codec = self.usage.codec_tokens
        if codec is None:
            return
        if abs(self.samples - codec * workload.samples_per_codec_token) > sample_tolerance:
            raise StreamError(f"{self.samples} samples, while usage has {codec} codec tokens")


async def timed(
    receive: Awaitable[None], check: Callable[[], None], timeout_s: float
) -> tuple[float, float, str | None]:
    """Receives an answer and checks it. Returns when that began and when the answer was complete, both on the
    clock of `time.perf_counter`, and why it failed, or None. Both may raise `StreamError`."""
    failure = None
    began_s = time.perf_counter()
    try:
        await receive
        end_s = time.perf_counter()
        check()
    except StreamError as error:
        failure, end_s = str(error)[:_MAX_FAILURE_CHARS], time.perf_counter()
    except TimeoutError:
        failure, end_s = f"not answered within {timeout_s:g} s", time.perf_counter()
    return began_s, end_s, failure


@dataclass(frozen=True)
class Client:
    """Sends requests to one server."""

    session: aiohttp.ClientSession
    url: str
    workload: Workload
    sample_tolerance: int
    timeout_s: float

    async def send(self, request: PreparedRequest, level_began_s: float) -> RequestRow:
        """Reports failures in the row. `level_began_s`: on the clock of `time.perf_counter`."""
        answer = _Answer()

        async def receive() -> None:
            timeout = aiohttp.ClientTimeout(total=self.timeout_s)
            async with aclosing(stream_chunks(self.session, self.url, request.body, timeout)) as chunks:
                async for chunk, arrived_s in chunks:
                    answer.add(chunk, arrived_s)

        sent_s, end_s, failure = await timed(
            receive(), lambda: answer.check(self.workload, self.sample_tolerance), self.timeout_s
        )
        playback = play(answer.arrivals)
        usage = answer.usage
        return RequestRow(
            index=request.index,
            sent_s=sent_s - level_began_s,
            failure=failure,
            ttft_s=answer.first_text_s - sent_s if answer.first_text_s is not None else None,
            ttfa_s=answer.arrivals[0].time_s - sent_s if answer.arrivals else None,
            end_to_end_s=end_s - sent_s,
            text_deltas=answer.text_deltas,
            audio_gaps_s=gaps(answer.arrivals),
            samples=answer.samples,
            underrun_s=playback.underrun_s,
            stalls=playback.stalls,
            finish_reason=answer.finish_reason,
            prompt_tokens=usage.prompt_tokens if usage is not None else None,
            cached_tokens=usage.cached_tokens if usage is not None else None,
            text_tokens=usage.text_tokens if usage is not None else None,
            codec_tokens=usage.codec_tokens if usage is not None else None,
        )
