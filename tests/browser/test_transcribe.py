"""Audio files and the microphone, transcribed."""

from dataclasses import replace
from pathlib import Path

import pytest

from omni_server.types import AboutModel, TextDelta, Transcribe
from tests.browser.browser import MEDIA, Browser, WebPage, wait_until
from tests.browser.scripted_server import ScriptedServer
from tests.unit.api.fake_generator import MODEL, TEXT, Hang

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


def test_a_model_that_understands_no_speech_is_told_of_before_anything_is_recorded(
    browser: Browser, server: ScriptedServer
) -> None:
    server.generator.model_info = replace(MODEL, about=AboutModel(understands_speech=False))
    page = browser.open(f"{server.url}#transcribe")
    page.wait_ready()
    assert page.texts("#transcribe-problem") == [
        "This model does not understand speech: it cannot transcribe."
    ]
    assert page.js("document.querySelectorAll('#transcribe button:disabled').length") == 2


def test_recording_is_transcribed(page: WebPage) -> None:
    page.click("#transcribe-record")
    page.wait("/^Stop recording, .*[1-9]$/.test(document.querySelector('#transcribe-record').textContent)")
    page.click("#transcribe-record")
    wait_written(page)
    assert page.texts("#transcript") == [TEXT]
    assert page.texts("#transcribe-record") == ["Record"]


def test_a_second_click_before_the_microphone_is_there_opens_no_other(page: WebPage) -> None:
    page.js(
        "(() => { window.opened = []; const devices = navigator.mediaDevices, open = devices.getUserMedia;"
        "devices.getUserMedia = (wanted) => window.opened.push(0) && open.call(devices, wanted);"
        "for (let i = 0; i < 2; i++) document.querySelector('#transcribe-record').click() })()"
    )
    page.wait("/^Stop recording, .*[1-9]$/.test(document.querySelector('#transcribe-record').textContent)")
    assert page.js("window.opened.length") == 1
    page.click("#transcribe-record")
    wait_written(page)


def test_text_is_seen_while_it_is_made_and_can_be_stopped(page: WebPage, server: ScriptedServer) -> None:
    server.generator.script = [TextDelta("So far", (0,)), Hang()]
    page.drop_here(WAV)
    page.wait("document.querySelector('#transcript').textContent === 'So far'")
    page.click("#transcribe-stop")
    wait_written(page)
    wait_until(server.generator.generations[0].closed.is_set)
    assert page.texts("#transcript") == ["So far"]


def test_file_of_another_kind_is_refused_in_words(page: WebPage, tmp_path: Path) -> None:
    (tmp_path / "letter.wav").write_text("Dear reader, " * 99)
    page.drop_here((tmp_path / "letter.wav", "audio/wav"))
    wait_written(page)
    (problem,) = page.texts("#transcribe-problem")
    assert problem.startswith("Audio file might be corrupted or unsupported.")
    assert page.texts("#transcript-name") == []
