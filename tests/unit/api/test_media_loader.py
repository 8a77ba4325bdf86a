"""Media of many requests at once: whose processes and memory they take."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import pytest

from omni_server.api.config import ApiConfig
from omni_server.api.media_loader import MediaLoader, MediaPart
from omni_server.api.schemas import (
    ImageUrlContent,
    InputAudio,
    InputAudioContent,
    MediaContent,
    MediaUrl,
    VideoUrlContent,
)
from omni_server.errors import InvalidRequestError, OverloadedError
from omni_server.media.limits import MediaLimits
from omni_server.media.source import MediaSource
from omni_server.types import AudioPart, ImagePart, VideoPart
from tests.unit.api.clients import app_of, base64_of, chat, data_url, error_of, http_client, media, tone
from tests.unit.api.fake_generator import VERSATILE_MODEL, FakeGenerator
from tests.unit.media.containers import record
from tests.unit.media.hanging_reader import hang, num_reading, wait_until_reading
from tests.unit.media.image_bombs import empty_scans

PNG, MP4 = media("gradient.png"), media("ball.mp4")
M4A = record("ipod", "aac", np.zeros((1, 48_000), dtype=np.float32), 48_000)


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
    return MediaLoader(ApiConfig(media_queue_timeout_s=queue_timeout_s), source)


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
    content = InputAudioContent(
        type="input_audio", input_audio=InputAudio(data=base64_of(tone()), format="wav")
    )
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
    await asyncio.gather(*loads, return_exceptions=True)  # not all of them find a process


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


VIDEO = VideoUrlContent(type="video_url", video_url=MediaUrl(url=data_url(MP4)))
SOUND = InputAudioContent(type="input_audio", input_audio=InputAudio(data=base64_of(M4A), format="wav"))
PICTURE = image(data_url(PNG))
EACH_KIND = pytest.mark.parametrize(
    ("content", "kind"),
    [(VIDEO, VideoPart), (SOUND, AudioPart), (PICTURE, ImagePart)],
    ids=["video", "sound", "picture"],
)


@EACH_KIND
async def test_who_leaves_while_a_process_decodes_leaves_neither_it_nor_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: MediaContent, kind: type[MediaPart]
) -> None:
    loader = MediaLoader(ApiConfig(media_processes=1))
    with monkeypatch.context() as patch:
        reader = hang(patch, tmp_path)
        load = asyncio.create_task(loader.load(content, "x"))
        await asyncio.to_thread(wait_until_reading, reader, 1)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert isinstance(await asyncio.wait_for(loader.load(content, "x"), 30), kind)
    assert num_reading(reader) == 0


@EACH_KIND
async def test_a_process_that_decodes_for_too_long_has_ended_when_the_caller_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: MediaContent, kind: type[MediaPart]
) -> None:
    loader = MediaLoader(ApiConfig(media_processes=1, media_queue_timeout_s=0.01))
    with monkeypatch.context() as patch:
        patch.setattr(loader, "_limits", MediaLimits(decode_timeout_s=2.0))
        reader = hang(patch, tmp_path)
        with pytest.raises(InvalidRequestError) as caught:
            await loader.load(content, "x")
        assert num_reading(reader) == 0
    assert caught.value.param == f"x.{content.type}.{'data' if content is SOUND else 'url'}"
    assert isinstance(await loader.load(content, "x"), kind)  # does not wait


async def test_all_services_share_the_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader = hang(monkeypatch, tmp_path)
    app = app_of(FakeGenerator(VERSATILE_MODEL), ApiConfig(media_processes=2, media_queue_timeout_s=0.01))
    form, messages = (
        {"model": "omni", "prompt": "Edit"},
        chat([{"type": "image_url", "image_url": {"url": data_url(PNG)}}]),
    )
    async with http_client(app) as client:

        def edit() -> Awaitable[httpx2.Response]:
            return client.post("/v1/images/edits", data=form, files={"image": ("a", PNG)})

        def transcribe() -> Awaitable[httpx2.Response]:
            return client.post("/v1/audio/transcriptions", data=form, files={"file": ("a", MP4)})

        running = [asyncio.ensure_future(request()) for request in (edit, transcribe)]
        await asyncio.to_thread(wait_until_reading, reader, 2)
        refused = [await edit(), await transcribe(), await client.post("/v1/chat/completions", json=messages)]
        assert [error_of(answer, 503)["code"] for answer in refused] == ["server_overloaded"] * 3
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
        for request in running:
            request.cancel()
        await asyncio.wait(running)


async def test_an_innocent_image_does_not_wait_for_two_that_take_long() -> None:
    loader, bomb = MediaLoader(ApiConfig()), image(data_url(empty_scans(4_000)))
    bombs = [asyncio.create_task(loader.load(bomb, "x")) for _ in range(2)]
    await asyncio.sleep(0.5)  # so that both are being decoded
    assert isinstance(await loader.load(PICTURE, "x"), ImagePart)
    assert not any(load.done() for load in bombs)
    for load in bombs:  # tests/unit/media/test_image_bombs.py waits for the end of one
        load.cancel()
    await asyncio.wait(bombs)
    assert isinstance(await loader.load(PICTURE, "x"), ImagePart)
