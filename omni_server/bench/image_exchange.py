"""One request for an image and its streamed answer."""

import base64
import struct
from contextlib import aclosing
from dataclasses import dataclass, field

import aiohttp

from omni_server.bench.exchange import PreparedRequest, timed
from omni_server.bench.results import RequestRow
from omni_server.bench.workload import Workload
from omni_server.client.stream import StreamedEvent, StreamError, stream_events

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_SIZE = struct.Struct(">II")
_PNG_SIZE_OFFSET = 16
"""After the signature, and the length and type of the first chunk."""


class ImageEvent(StreamedEvent):
    """One event of `/v1/images/generations`."""

    called = "an event of an image"
    type: str = ""
    b64_json: str = ""
    """Base64 of a PNG."""


@dataclass
class _Answer:
    """The answer so far; times are on the clock of `time.perf_counter`."""

    previews_s: list[float] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    def add(self, event: ImageEvent, now_s: float) -> None:
        match event.type:
            case "image_generation.partial_image":
                self.previews_s.append(now_s)
            case "image_generation.completed":
                self.images.append(event.b64_json)

    def check(self, workload: Workload) -> None:
        """Raises `StreamError` if the answer is not one PNG of the requested size."""
        if len(self.images) != 1:
            raise StreamError(f"{len(self.images)} images instead of 1")
        size = _png_size(self.images[0])
        if workload.size not in (None, size):
            raise StreamError(f"an image of {size} instead of {workload.size}")


@dataclass(frozen=True)
class ImageClient:
    """Sends requests for images to one server."""

    session: aiohttp.ClientSession
    url: str
    workload: Workload
    timeout_s: float

    async def send(self, request: PreparedRequest, level_began_s: float) -> RequestRow:
        """Reports failures in the row. `level_began_s`: on the clock of `time.perf_counter`."""
        answer = _Answer()

        async def receive() -> None:
            timeout = aiohttp.ClientTimeout(total=self.timeout_s)
            async with aclosing(stream_events(self.session, self.url, request.body, timeout)) as events:
                async for data, arrived_s in events:
                    answer.add(ImageEvent.parse(data), arrived_s)

        sent_s, end_s, failure = await timed(receive(), lambda: answer.check(self.workload), self.timeout_s)
        return RequestRow(
            index=request.index,
            sent_s=sent_s - level_began_s,
            failure=failure,
            ttft_s=None,
            ttfa_s=None,
            end_to_end_s=end_s - sent_s,
            text_deltas=0,
            audio_gaps_s=[],
            samples=0,
            underrun_s=0.0,
            stalls=0,
            finish_reason=None,
            prompt_tokens=None,
            cached_tokens=None,
            text_tokens=None,
            codec_tokens=None,
            preview_s=answer.previews_s[0] - sent_s if answer.previews_s else None,
            previews=len(answer.previews_s),
        )


def _png_size(encoded: str) -> str:
    """Returns the size of a PNG in base64, as in "1024x1024". Raises `StreamError`."""
    try:
        file = base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise StreamError("an image that is not base64") from error
    if not file.startswith(_PNG_SIGNATURE) or len(file) < _PNG_SIZE_OFFSET + _PNG_SIZE.size:
        raise StreamError("an image that is not a PNG")
    width, height = _PNG_SIZE.unpack_from(file, _PNG_SIZE_OFFSET)
    return f"{width}x{height}"
