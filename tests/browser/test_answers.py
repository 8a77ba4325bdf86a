"""Asking, seeing and hearing, with a generator whose every step is known."""

import asyncio
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from omni_server.errors import StageError
from omni_server.types import AudioDelta, TextDelta
from tests.browser.browser import MEDIA, Browser, WebPage, wait_until
from tests.browser.scripted_server import ScriptedServer
from tests.unit.api.fake_generator import (
    MODEL,
    SAMPLES,
    TEXT,
    TEXT_ONLY_MODEL,
    Hang,
    Wait,
    finished,
    speech_script,
    text_script,
)

SECOND = np.sin(np.arange(24_000, dtype=np.float32) / 20) * np.float32(0.5)
HELD = """
window.AudioContext = class extends AudioContext {
  constructor(options) {
    super(options);
    this.suspend();
    window.release = () => super.resume();
  }
  resume() {}
};
"""
"""The clock of playback stands still until `release` is called."""


@pytest.fixture
def answered_at_once(browser: Browser, server: ScriptedServer) -> WebPage:
    """An answer has been heard of which every piece came before the one before it had been heard."""
    page = browser.open(server.url, script=HELD)
    page.wait_ready()
    page.ask("Hello")
    page.wait_complete()
    page.js("void window.release()")
    page.wait_answered()
    return page


def test_text_and_audio_are_there_before_the_answer_is_complete(
    page: WebPage, server: ScriptedServer
) -> None:
    sound, rest = asyncio.Event(), asyncio.Event()
    server.generator.script = [
        TextDelta("First words", (0,)),
        Wait(sound),
        AudioDelta(0, SECOND),
        Wait(rest),
        TextDelta(", last words", (1,)),
        finished(codec_tokens=50),
    ]
    page.ask("Hello")
    page.wait("document.querySelector('.answer > .text').textContent === 'First words'")
    assert page.sounds() == []
    page.wait("/^First text [0-9.]+ s$/.test(document.querySelector('.first-text').textContent)")
    assert page.texts(".first-audio") == []
    page.wait("/^Preparing speech, [1-9] s$/.test(document.querySelector('.preparing').textContent)")

    server.set(sound)
    page.wait("window.scheduledSounds.length > 0")
    page.wait("/^First audio [0-9.]+ s$/.test(document.querySelector('.first-audio').textContent)")
    assert page.texts(".preparing") == []
    assert page.texts(".total") == []

    server.set(rest)
    page.wait_answered()
    assert page.text(".answer > .text") == "First words, last words"
    assert re.fullmatch(r"Done \d+\.\d\d s", " ".join(page.texts(".total")))


def test_audio_is_played_whole_and_without_a_gap(answered_at_once: WebPage) -> None:
    page = answered_at_once
    sounds = page.sounds()
    assert {sound["rate"] for sound in sounds} == {24_000}
    played = np.concatenate([sound["samples"] for sound in sounds])
    assert len(played) == len(SAMPLES)
    assert np.abs(played - SAMPLES).max() <= 1.5 / 32768  # rounded to 16 bits
    starts = [round(sound["time"] * 24_000) for sound in sounds]
    lengths = [len(sound["samples"]) for sound in sounds]
    assert len(sounds) > 1
    assert [after - before for before, after in pairwise(starts)] == lengths[:-1]


def test_timeline_shows_every_stage(answered_at_once: WebPage) -> None:
    page = answered_at_once
    assert page.texts(".lane") == []  # until somebody wants to know
    page.click("summary")
    assert page.texts(".lane > span") == ["Request", "Text", "Speech", "Playback", ""]
    label = page.js("document.querySelector('.timeline').getAttribute('aria-label')")
    assert re.fullmatch(
        r"Timeline: Request from .* s; Text from .* s; Speech from .* s; Playback from .* s\.", label
    )
    assert page.js("document.querySelectorAll('.played .span').length") == 1
    assert page.text(".request-id").startswith("Request req_")


def test_answer_can_be_heard_again(page: WebPage) -> None:
    page.ask("Hello")
    page.wait_answered()
    assert page.num_samples() == len(SAMPLES)
    page.click(".audio .play")
    page.wait("!document.querySelector('.playing')")
    assert page.num_samples() == 2 * len(SAMPLES)


def test_stop_ends_the_answer_on_the_server_and_its_audio(page: WebPage, server: ScriptedServer) -> None:
    server.generator.script = [TextDelta("I could go on", (0,)), AudioDelta(0, np.tile(SECOND, 20)), Hang()]
    page.ask("Hello")
    page.wait("document.querySelector('.playing')")
    page.click("#stop")
    page.wait_answered()
    wait_until(server.generator.generations[0].closed.is_set)
    assert page.js("[window.stoppedSounds, window.scheduledSounds.length]") == [1, 1]
    assert page.texts(".note") == ["Stopped."]

    server.generator.script = None
    page.ask("And now?")
    page.wait_answered(2)
    assert page.texts(".failure") == []
    history = page.questions()[-1]["messages"]
    assert history[1] == {
        "role": "assistant",
        "content": "I could go on",
    }  # an answer that broke off has no id


def test_escape_stops_the_answer(page: WebPage, server: ScriptedServer) -> None:
    server.generator.script = [TextDelta("I could go on", (0,)), Hang()]
    page.ask("Hello")
    page.wait("document.querySelector('.answer > .text').textContent === 'I could go on'")
    page.find("#text").send_keys("\ue00c")
    page.wait_answered()
    wait_until(server.generator.generations[0].closed.is_set)


def test_new_question_cuts_the_answer_short_and_the_model_knows_what_it_had_said(
    page: WebPage, server: ScriptedServer
) -> None:
    server.generator.script = [TextDelta("I could go on", (0,)), Hang()]
    page.ask("Hello")
    page.wait("document.querySelector('.answer > .text').textContent === 'I could go on'")
    server.generator.script = None
    page.ask("Stop!")
    page.wait_answered(2)
    wait_until(server.generator.generations[0].closed.is_set)
    said = [message["content"] for message in page.questions()[-1]["messages"]]
    assert said == ["Hello", "I could go on", "Stop!"]
    assert page.texts(".note") == ["Stopped."]


def test_conversation_refers_to_spoken_answers_by_id(page: WebPage, server: ScriptedServer) -> None:
    page.ask("Hello")
    page.wait_answered()
    page.ask("And then?")
    page.wait_answered(2)
    first, second = page.questions()
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["audio"]["id"].startswith("audio_")
    assert first["stream"] is True
    assert first["audio"] == {"voice": "Chelsie", "format": "pcm16"}
    said = [message.content[0] for message in server.generator.last_request.messages]
    assert [part.text for part in said] == ["Hello", TEXT, "And then?"]  # type: ignore[union-attr]

    page.click("#new-button")
    assert page.texts(".turn") == []
    page.ask("Hello again")
    page.wait_answered()
    assert len(server.generator.last_request.messages) == 1


def test_answer_without_voice_has_text_only(page: WebPage, server: ScriptedServer) -> None:
    page.click("#speak")
    page.ask("Hello")
    page.wait_answered()
    assert server.generator.last_request.speech is None
    assert page.text(".answer > .text") == TEXT
    assert page.sounds() == []
    page.click("summary")
    assert page.texts(".lane > span") == ["Request", "Text", ""]
    page.ask("And then?")
    page.wait_answered(2)
    assert page.questions()[-1]["messages"][1] == {"role": "assistant", "content": TEXT}


def test_chosen_voice_speaks(page: WebPage, server: ScriptedServer) -> None:
    assert page.voices() == ["Chelsie", "Ethan"]
    page.find("#voice").send_keys("Ethan")
    page.ask("Hello")
    page.wait_answered()
    speech = server.generator.last_request.speech
    assert speech is not None
    assert speech.voice == "Ethan"


def test_voices_are_those_that_the_server_lists_without_aliases(
    page: WebPage, server: ScriptedServer
) -> None:
    server.voices = [
        {"id": "Vivian", "name": "Vivian (calm)", "alias_of": None},
        {"id": "Ethan", "name": "Ethan", "alias_of": None},
        {"id": "alloy", "name": "alloy", "alias_of": "Vivian"},
    ]
    page.browser.driver.refresh()
    page.wait_ready()
    assert page.voices() == ["Vivian (calm)", "Ethan"]
    server.generator.model_info = replace(MODEL, voices=("Vivian", "Ethan"), default_voice="Vivian")
    page.ask("Hello")
    page.wait_answered()
    speech = server.generator.last_request.speech
    assert speech is not None
    assert speech.voice == "Vivian"


def test_model_that_cannot_speak_is_not_asked_to(page: WebPage, server: ScriptedServer) -> None:
    server.generator.model_info = replace(TEXT_ONLY_MODEL, input_modalities=("image",))
    page.browser.driver.refresh()
    page.wait_ready()
    assert page.texts("#speak-option, .voice-option, #mic, #big-mic") == []
    assert page.texts("[role=tab]") == ["Chat"]
    page.ask("Hello")
    page.wait_answered()
    assert page.text(".answer > .text") == TEXT


def test_failure_in_mid_answer_is_told_and_can_be_retried(page: WebPage, server: ScriptedServer) -> None:
    server.generator.script = [TextDelta("So far", (0,)), StageError("talker", "it has hiccups")]
    page.ask("Hello")
    page.wait_answered()
    assert page.text(".answer > .text") == "So far"
    assert page.texts(".failure p") == ["stage 'talker': it has hiccups"]

    server.generator.script = text_script()
    page.wait_ready()
    page.click(".retry")
    page.wait_answered(2)
    assert len(server.generator.last_request.messages) == 1
    assert page.texts(".retry") == []


def test_media_of_early_questions_give_way_where_a_prompt_may_hold_no_more(
    page: WebPage, server: ScriptedServer
) -> None:
    for number in range(1, MODEL.max_media_per_prompt["image"] + 2):
        page.choose(MEDIA / "shapes.png")
        page.ask(f"Picture {number}?")
        page.wait_answered(number)
    assert page.texts(".failure") == []
    first, second, third = (m["content"] for m in page.questions()[-1]["messages"] if m["role"] == "user")
    assert first == "[image, no longer available] Picture 1?"
    assert [part["type"] for part in second] == [part["type"] for part in third] == ["image_url", "text"]


def test_markup_in_an_answer_is_shown_not_run(page: WebPage, server: ScriptedServer) -> None:
    markup = "<img src=x onerror=alert(1)> & <b>bold</b>"
    server.generator.script = [TextDelta(markup, (0,)), *speech_script()[-1:]]
    page.ask(markup)
    page.wait_answered()
    assert page.text(".answer > .text") == page.text(".question .text") == markup
    assert page.js("document.querySelectorAll('.turn img, .turn p b').length") == 0
