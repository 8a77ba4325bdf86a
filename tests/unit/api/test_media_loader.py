"""Media of many requests at once: whose threads and memory they take."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from omni_server.api.media_loader import MediaLoader
from omni_server.api.schemas import ImageUrlContent, InputAudio, InputAudioContent, MediaUrl
from omni_server.errors import InvalidRequestError, OverloadedError
from omni_server.media.limits import MediaLimits
from omni_server.media.source import MediaSource
from omni_server.types import AudioPart, ImagePart
from tests.unit.api.clients import base64_of, data_url, media, tone

PNG = media("gradient.png")


class GatedSource(MediaSource):
    """http(s) and `file:` URLs give a picture when `gate` is set."""

    def __init__(self) -> None:
        super().__init__((), MediaLimits())
        self.gate = asyncio.Event()
        self.num_reading = 0

    async def read(self, url: str) -> bytes:
        if url.startswith("data:"):
            return await super().read(url)
        self.num_reading += 1
        await self.gate.wait()
        if url.endswith("broken"):
            raise InvalidRequestError("no", code="media_fetch_failed")
        return PNG


def loader_of(source: MediaSource, *, queue_timeout_s: float = 30.0) -> MediaLoader:
    return MediaLoader(source, MediaLimits(), num_threads=2, decode_timeout_s=60.0, queue_timeout_s=queue_timeout_s)


def image(url: str) -> ImageUrlContent:
    return ImageUrlContent(type="image_url", image_url=MediaUrl(url=url))


@pytest.fixture
async def busy_default_threads() -> AsyncIterator[None]:
    """All threads of the event loop's own executor wait for something."""
    release = threading.Event()
    executor = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    blocked = asyncio.ensure_future(asyncio.to_thread(release.wait, 30))
    await asyncio.sleep(0)
    yield
    release.set()
    await blocked


@pytest.mark.usefixtures("busy_default_threads")
async def test_decoding_has_threads_of_its_own() -> None:
    content = InputAudioContent(type="input_audio", input_audio=InputAudio(data=base64_of(tone()), format="wav"))
    part = await asyncio.wait_for(loader_of(MediaSource((), MediaLimits())).load(content, "x"), 10)
    assert isinstance(part, AudioPart)


@pytest.mark.parametrize("url", ["https://host/{}", "HTTP://host/{}", "file:///media/{}"])
async def test_bodies_of_few_urls_are_in_memory_at_once(url: str) -> None:
    source = GatedSource()
    loader = loader_of(source)
    loads = [asyncio.create_task(loader.load(image(url.format(n)), "x")) for n in range(20)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert source.num_reading == 8
    # What came with its request does not wait for them.
    assert isinstance(await asyncio.wait_for(loader.load(image(data_url(PNG)), "x"), 10), ImagePart)
    source.gate.set()
    assert all(isinstance(part, ImagePart) for part in await asyncio.gather(*loads))


async def test_who_waits_too_long_for_a_fetch_is_told_that_the_server_is_busy() -> None:
    source = GatedSource()
    loader = loader_of(source, queue_timeout_s=0.01)
    loads = [asyncio.create_task(loader.load(image("https://host/a"), "x")) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await loader.load(image("https://host/a"), "x")
    loads[0].cancel()
    await asyncio.wait(loads[:1])
    source.gate.set()
    await asyncio.wait_for(loads[1], 10)


async def test_fetches_that_fail_or_are_left_make_room_for_others() -> None:
    source = GatedSource()
    loader = loader_of(source)
    left = [asyncio.create_task(loader.load(image("https://host/a"), "x")) for _ in range(8)]
    await asyncio.sleep(0)
    for load in left:
        load.cancel()
    await asyncio.wait(left)
    source.gate.set()
    for _ in range(9):
        with pytest.raises(InvalidRequestError) as caught:
            await loader.load(image("https://host/broken"), "messages[0].content[0]")
        assert caught.value.param == "messages[0].content[0].image_url.url"
    assert isinstance(await asyncio.wait_for(loader.load(image("https://host/a"), "x"), 10), ImagePart)
