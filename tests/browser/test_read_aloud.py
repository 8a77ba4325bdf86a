"""Texts read aloud: heard at once, and downloaded as they were asked for."""

import io

import numpy as np
import pytest
import soundfile

from omni_server.api.config import ApiConfig
from omni_server.errors import OverloadedError
from omni_server.types import AudioDelta, ReadAloud
from tests.browser.browser import DOWNLOADS, Browser, WebPage
from tests.browser.scripted_server import ScriptedServer
from tests.unit.api.fake_generator import SAMPLES, Hang


@pytest.fixture
def page(browser: Browser, server: ScriptedServer) -> WebPage:
    page = browser.open(f"{server.url}#read-aloud", script=DOWNLOADS)
    page.wait_ready()
    return page


def read(page: WebPage, text: str = "Good morning!") -> None:
    page.find("#read-text").send_keys(text)
    page.click("#read-start")


def wait_read(page: WebPage) -> None:
    page.wait("!document.querySelector('#read-start').hidden")


def test_text_is_heard_and_can_be_downloaded(page: WebPage, server: ScriptedServer) -> None:
    read(page, "Good morning!\nHow are you?")
    wait_read(page)
    assert server.generator.tasks == [ReadAloud("Good morning!\nHow are you?")]
    played = np.concatenate([sound["samples"] for sound in page.sounds()])
    assert len(played) == len(SAMPLES)
    assert np.abs(played - SAMPLES).max() <= 1.5 / 32768
    assert page.text("#read-status").startswith("0.29 s of speech, made in ")

    name, content = page.downloaded("#read-download")
    samples, rate_hz = soundfile.read(io.BytesIO(content), dtype="float32")
    assert (name, rate_hz) == ("speech.wav", 24_000)
    assert np.abs(samples - SAMPLES).max() <= 1.5 / 32768


def test_text_that_the_server_would_refuse_for_its_length_cannot_be_sent(page: WebPage) -> None:
    page.js(
        "(text => { text.value = '\\u{1F600}'.repeat(4097); text.dispatchEvent(new Event('input')); })"
        "(document.querySelector('#read-text'))"
    )
    assert page.text("#read-count") == "4097 of 4096 characters: too long"
    assert not page.find("#read-start").is_enabled()


def test_the_limit_is_the_servers(browser: Browser, server: ScriptedServer) -> None:
    server.reset(ApiConfig(max_speech_characters=9))
    page = browser.open(f"{server.url}#read-aloud")
    page.wait_ready()
    page.find("#read-text").send_keys("0123456789")
    assert page.text("#read-count") == "10 of 9 characters: too long"
    assert not page.find("#read-start").is_enabled()


def test_voice_speed_and_format_reach_the_request_and_survive_a_reload(page: WebPage) -> None:
    page.find("#read-voice").send_keys("Ethan")
    page.find("#format").send_keys("MP3")
    page.js(
        "(speed => { speed.value = 2; speed.dispatchEvent(new Event('input')); })(document.querySelector('#speed'))"
    )
    assert page.text("#speed-shown") == "2 ×"
    page.browser.driver.refresh()
    page.wait_ready()
    page.find("#read-instructions").send_keys("Whisper")
    read(page)
    wait_read(page)
    (body,) = page.bodies("v1/audio/speech")
    fields = ("input", "instructions", "voice", "response_format", "speed", "stream")
    assert {name: body[name] for name in fields} == {
        "input": "Good morning!",
        "instructions": "Whisper",
        "voice": "Ethan",
        "response_format": "mp3",
        "speed": 2,
        "stream": True,
    }
    # Twice as fast, with what MP3 adds at both ends.
    assert len(SAMPLES) / 2 <= page.num_samples() < len(SAMPLES) / 2 + 4000
    name, content = page.downloaded("#read-download")
    assert name == "speech.mp3"
    assert soundfile.info(io.BytesIO(content)).format == "MP3"


def test_every_format_is_played(page: WebPage) -> None:
    page.find("#read-text").send_keys("Good morning!")
    for name in ("FLAC", "Opus", "AAC", "PCM"):
        before = page.num_samples()
        page.find("#format").send_keys(name)
        page.click("#read-start")
        wait_read(page)
        assert page.texts("#read-problem") == []
        assert len(SAMPLES) <= page.num_samples() - before < len(SAMPLES) + 6000, name


def test_audio_is_played_before_it_is_complete_and_can_be_stopped(
    page: WebPage, server: ScriptedServer
) -> None:
    server.generator.script = [AudioDelta(0, np.tile(SAMPLES, 20)), Hang()]
    read(page)
    page.wait("window.scheduledSounds.length > 0")
    assert page.text("#read-status").startswith("First audio after ")
    page.click("#read-stop")
    wait_read(page)
    page.wait("document.querySelector('#read-status').textContent === 'Stopped.'")
    assert page.js("window.stoppedSounds") > 0
    assert page.texts("#read-download") == []


def test_refusal_is_told_and_a_missing_key_asked_for(page: WebPage, server: ScriptedServer) -> None:
    server.generator.submit_error = OverloadedError("The server is at its limit; try again later.")
    read(page)
    wait_read(page)
    assert page.texts("#read-problem") == ["The server is at its limit; try again later."]

    server.generator.submit_error = None
    server.key = "right"
    page.click("#read-start")
    page.wait("document.querySelector('#key-dialog').open")
    page.find("#key").send_keys("right\n")
    wait_read(page)
    assert page.num_samples() == len(SAMPLES)
