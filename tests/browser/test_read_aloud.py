"""Texts read aloud: heard at once, and downloaded as they were asked for."""

import io
from dataclasses import replace

import httpx2
import numpy as np
import pytest
import soundfile

from omni_server.api.config import ApiConfig
from omni_server.errors import OverloadedError
from omni_server.types import AudioDelta, ClonedVoice, ReadAloud
from tests.browser.browser import DOWNLOADS, MEDIA, Browser, WebPage
from tests.browser.scripted_server import ScriptedServer
from tests.unit.api.fake_generator import CLONING_MODEL, SAMPLES, Hang


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


# -- voices of the user's own


@pytest.fixture
def cloning_page(browser: Browser, server: ScriptedServer) -> WebPage:
    """Of a model that speaks with the voices of recordings, and has got one."""
    server.generator.model_info = CLONING_MODEL
    recording = {"audio_sample": (MEDIA / "speech_hello.wav").read_bytes()}
    httpx2.post(f"{server.url}v1/audio/voices", data={"name": "Ada", "consent": "Ada"}, files=recording)
    page = browser.open(f"{server.url}#read-aloud")
    page.wait_ready()
    page.click("#own-voices summary")
    return page


def add_voice(page: WebPage, name: str) -> None:
    page.find("#voice-name").send_keys(name)
    page.find("#voice-consent").send_keys("Bob himself, today")
    page.click("#voice-add")


def test_voice_that_was_recorded_reads_the_next_text(cloning_page: WebPage, server: ScriptedServer) -> None:
    page = cloning_page
    page.click("#voice-record")
    page.wait("/^Stop recording, .*[1-9]$/.test(document.querySelector('#voice-record').textContent)")
    page.click("#voice-record")
    page.wait("document.querySelector('#voice-recording').textContent === 'Recording.wav'")
    page.find("#voice-words").send_keys("Hello there")
    add_voice(page, "Bob")
    page.wait("document.querySelectorAll('#own-voice-list li').length === 2")
    assert page.voices() == ["Ada", "Bob"]
    recording = server.generator.recordings[-1]
    assert recording.sample_rate_hz == 24_000
    assert len(recording.samples) > 12_000
    assert np.abs(recording.samples).max() > 0.01

    page.wait_ready()
    read(page)
    wait_read(page)
    assert page.texts("#read-problem") == []
    speech = server.generator.last_request.speech
    assert speech is not None
    assert speech.clone == ClonedVoice(recording.samples[:4].tobytes(), bytes(32), "Hello there")
    assert not page.find("#voice-add").is_enabled()


def test_refused_voice_keeps_what_was_entered(cloning_page: WebPage) -> None:
    page = cloning_page
    page.find("#voice-file").send_keys(str(MEDIA / "speech_hello.wav"))
    add_voice(page, "Ada")
    page.wait("!document.querySelector('#voice-problem').hidden")
    assert page.texts("#voice-problem") == ["There is a voice 'Ada' already: delete it first."]
    page.find("#voice-name").send_keys(" II")
    page.click("#voice-add")
    page.wait("document.querySelectorAll('#own-voice-list li').length === 2")
    assert page.voices() == ["Ada", "Ada II"]
    assert page.js("document.querySelector('#read-voice').value") == "Ada II"
    assert page.texts("#voice-problem") == []


def test_voice_is_chosen_from_the_list_and_deleted_once_that_is_confirmed(cloning_page: WebPage) -> None:
    page = cloning_page
    page.click("#own-voice-list .open")
    assert page.js("document.querySelector('#read-voice').value") == "Ada"
    page.click("#own-voice-list .forget")
    page.browser.driver.switch_to.alert.dismiss()
    assert page.texts("#own-voice-list .title") == ["Ada"]
    page.click("#own-voice-list .forget")
    page.browser.driver.switch_to.alert.accept()
    page.wait("document.querySelectorAll('#own-voice-list li').length === 0")
    assert page.voices() == []
    assert page.js("document.querySelector('[role=tab][aria-selected=true]').textContent") == "Read aloud"


def test_only_models_that_clone_voices_are_offered_recordings_and_described_ones_a_description(
    browser: Browser, server: ScriptedServer, page: WebPage
) -> None:
    assert page.texts("#own-voices") == []
    assert page.texts("#read-instructions-label") == ["Instructions"]

    server.generator.model_info = replace(CLONING_MODEL, outputs=frozenset({"audio"}))
    page = browser.open(f"{server.url}#read-aloud")
    page.wait_ready()
    assert page.texts("#own-voices") == []
    assert page.texts("#read-instructions-label") == ["Description of the voice"]
