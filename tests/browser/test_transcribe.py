"""Audio files and the microphone, transcribed."""

import pytest

from omni_server.types import TextDelta, Transcribe
from tests.browser.browser import MEDIA, Browser, WebPage, wait_until
from tests.browser.scripted_server import ScriptedServer
from tests.unit.api.fake_generator import TEXT, Hang

WAV = (MEDIA / "speech_hello.wav", "audio/wav")


@pytest.fixture
def page(browser: Browser, server: ScriptedServer) -> WebPage:
    page = browser.open(f"{server.url}#transcribe")
    page.wait_ready()
    return page


def wait_written(page: WebPage) -> None:
    page.wait("document.querySelector('#transcript-box').getAttribute('aria-busy') === 'false'")


def test_dropped_file_is_transcribed(page: WebPage, server: ScriptedServer) -> None:
    page.drop_here(WAV)
    wait_written(page)
    assert page.texts("#transcript") == [TEXT]
    assert page.texts("#transcript-name") == ["speech_hello.wav"]
    (task,) = server.generator.tasks
    assert isinstance(task, Transcribe)
    assert len(task.audio.samples) > 2 * 16_000
    assert page.text("#announcer") == TEXT
    assert page.copied("#transcript-copy") == TEXT
    # The audio that was transcribed can be heard.
    page.click("#transcript-audio .play")
    page.wait("window.scheduledSounds.length > 0")


def test_text_is_seen_while_it_is_made_and_can_be_stopped(page: WebPage, server: ScriptedServer) -> None:
    server.generator.script = [TextDelta("So far", (0,)), Hang()]
    page.drop_here(WAV)
    page.wait("document.querySelector('#transcript').textContent === 'So far'")
    page.click("#transcribe-stop")
    wait_written(page)
    wait_until(server.generator.generations[0].closed.is_set)
    assert page.texts("#transcript") == ["So far"]
