"""One request and its streamed answer, with the times at which the parts arrived."""

import time
from dataclasses import dataclass, field

import aiohttp

from omni_server.bench.adapters import Adapter, Delta, RequestFailedError, TokenCounts
from omni_server.bench.playback import AudioArrival, gaps, play
from omni_server.bench.results import RequestRow
from omni_server.bench.workload import SAMPLES_PER_CODE
from omni_server.client.chunks import error_message
from omni_server.client.reach import why_unreachable
from omni_server.client.sse import EventParser

_BYTES_PER_SAMPLE = 2


@dataclass(frozen=True)
class PreparedRequest:
    """A body that is ready to send, and how long the answer to it must be."""

    index: int
    body: bytes
    text_tokens: int
    samples: int
    sample_tolerance: int = 0


@dataclass
class Answer:
    """What has arrived so far; times on the clock of `time.perf_counter`."""

    first_text_s: float | None = None
    text_deltas: int = 0
    arrivals: list[AudioArrival] = field(default_factory=list)
    audio_bytes: int = 0
    finish_reason: str | None = None
    tokens: TokenCounts | None = None
    done: bool = False

    @property
    def samples(self) -> int:
        return self.audio_bytes // _BYTES_PER_SAMPLE

    def add(self, delta: Delta, now_s: float) -> None:
        if delta.text:
            self.text_deltas += 1
            if self.first_text_s is None:
                self.first_text_s = now_s
        if delta.audio:
            before = self.samples
            self.audio_bytes += len(delta.audio)
            if self.samples > before:
                self.arrivals.append(AudioArrival(now_s, self.samples - before))
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
        # Some servers repeat the usage with every chunk, and with zeros on chunks of sound.
        if delta.tokens is not None and (self.tokens is None or delta.tokens.text >= self.tokens.text):
            self.tokens = delta.tokens

    def check(self, request: PreparedRequest) -> None:
        """Raises `RequestFailedError` if this is not the whole answer, exactly as long as it was asked for."""
        if not self.done:
            raise RequestFailedError("the stream ended without [DONE]")
        if self.tokens is None:
            raise RequestFailedError("no usage in the stream")
        if self.tokens.text != request.text_tokens:
            raise RequestFailedError(f"{self.tokens.text} text tokens instead of {request.text_tokens}")
        if self.audio_bytes % _BYTES_PER_SAMPLE:
            raise RequestFailedError("half a sample at the end of the sound")
        if abs(self.samples - request.samples) > request.sample_tolerance:
            raise RequestFailedError(f"{self.samples} samples instead of {request.samples}")
        codec = self.tokens.codec
        if codec is not None and abs(self.samples - codec * SAMPLES_PER_CODE) > request.sample_tolerance:
            raise RequestFailedError(f"{self.samples} samples, while usage has {codec} codec tokens")


class Client:
    """Sends requests to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, adapter: Adapter, timeout_s: float) -> None:
        self._session = session
        self._url = url
        self._adapter = adapter
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._timeout_s = timeout_s

    async def send(self, request: PreparedRequest, level_began_s: float) -> RequestRow:
        """Failures of the request are in the row. `level_began_s`: on the clock of `time.perf_counter`."""
        answer = Answer()
        failure = None
        sent_s = time.perf_counter()
        try:
            await self._exchange(request.body, answer)
            end_s = time.perf_counter()
            answer.check(request)
        except RequestFailedError as error:
            failure, end_s = str(error), time.perf_counter()
        except TimeoutError:
            failure, end_s = f"not answered within {self._timeout_s:g} s", time.perf_counter()
        except aiohttp.ClientPayloadError:
            failure, end_s = "the stream broke", time.perf_counter()
        except aiohttp.ClientError as error:
            failure, end_s = f"the server cannot be reached: {why_unreachable(error)}"[:200], time.perf_counter()
        playback = play(answer.arrivals)
        tokens = answer.tokens
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
            prompt_tokens=tokens.prompt if tokens is not None else None,
            cached_tokens=tokens.cached if tokens is not None else None,
            text_tokens=tokens.text if tokens is not None else None,
            codec_tokens=tokens.codec if tokens is not None else None,
        )

    async def _exchange(self, body: bytes, answer: Answer) -> None:
        parser = EventParser()
        async with self._session.post(self._url, data=body, timeout=self._timeout) as response:
            if response.status != 200:
                raise RequestFailedError(f"HTTP {response.status}: {error_message(await response.read())[:200]}")
            async for piece in response.content.iter_any():
                now_s = time.perf_counter()  # before any parsing, which is not the server's time
                for data in parser.feed(piece):
                    if data == b"[DONE]":
                        answer.done = True
                    else:
                        answer.add(self._adapter.read(data), now_s)
