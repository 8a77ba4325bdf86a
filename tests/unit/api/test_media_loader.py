"""Media of many requests at once: whose threads and memory they take."""

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omni_server.api.config import ApiConfig
from omni_server.api.media_loader import MediaLoader
from omni_server.api.schemas import ImageUrlContent, InputAudio, InputAudioContent, MediaUrl, VideoUrlContent
from omni_server.errors import InvalidRequestError, OverloadedError
from omni_server.media.limits import MediaLimits
from omni_server.media.source import MediaSource
from omni_server.types import AudioPart, ImagePart, VideoPart
from tests.unit.api.clients import base64_of, data_url, media, tone

PNG, MP4 = media("gradient.png"), media("ball.mp4")


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
    return MediaLoader(source, MediaLimits(), ApiConfig(media_queue_timeout_s=queue_timeout_s))


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


def hanging_program(folder: Path) -> Path:
    """In place of Python: a process that never ends, its number in the file `pid` beside it."""
    program = folder / "python"
    program.write_text("#!/bin/sh\necho $$ > $0.new && mv $0.new ${0%/*}/pid\nexec sleep 600\n")
    program.chmod(0o755)
    return program


def wait_until(is_there: bool, path: Path) -> None:
    for _ in range(3_000):
        if path.exists() == is_there:
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} did not become what it should")


def process_of(folder: Path) -> Path:
    """Of the program, as soon as it runs."""
    wait_until(True, folder / "pid")
    return Path("/proc", (folder / "pid").read_text().strip())


@pytest.mark.parametrize("kind", ["video", "audio"])
async def test_who_leaves_while_a_process_decodes_leaves_neither_it_nor_a_busy_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    loader = MediaLoader(MediaSource((), MediaLimits()), MediaLimits(), ApiConfig(media_threads=1))
    video = VideoUrlContent(type="video_url", video_url=MediaUrl(url=data_url(MP4)))
    sound = InputAudioContent(type="input_audio", input_audio=InputAudio(data=base64_of(MP4), format="wav"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(hanging_program(tmp_path)))
        load = asyncio.create_task(loader.load(video if kind == "video" else sound, "x"))
        process = await asyncio.to_thread(process_of, tmp_path)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    await asyncio.to_thread(wait_until, False, process)
    assert isinstance(await asyncio.wait_for(loader.load(video, "x"), 30), VideoPart)


async def test_a_process_that_decodes_for_too_long_is_ended_and_its_thread_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = ApiConfig(media_threads=1, media_decode_timeout_s=5.0)
    loader = MediaLoader(MediaSource((), MediaLimits()), MediaLimits(), config)
    video = VideoUrlContent(type="video_url", video_url=MediaUrl(url=data_url(MP4)))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(hanging_program(tmp_path)))
        with pytest.raises(InvalidRequestError) as caught:
            await loader.load(video, "x")
    assert caught.value.message == "The media item could not be decoded within 5 s."
    assert (caught.value.code, caught.value.param) == ("media_too_large", "x.video_url.url")
    await asyncio.to_thread(wait_until, False, process_of(tmp_path))
    assert isinstance(await asyncio.wait_for(loader.load(video, "x"), 30), VideoPart)
