"""A hands-free conversation: the browser's microphone hears somebody speak, pause, and speak again."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omni_server.errors import InvalidRequestError
from omni_server.types import AboutModel, AudioDelta, TextDelta, Transcribe
from tests.browser.browser import Browser, WebPage, wait_until
from tests.browser.scripted_server import ScriptedServer
from tests.unit.api.fake_generator import MODEL, Hang, finished

MINUTE = np.sin(np.arange(60 * 24_000, dtype=np.float32) / 20) * np.float32(0.5)
LONG_ANSWER = [TextDelta("I could go on.", (0,)), AudioDelta(0, MINUTE), finished(codec_tokens=3000)]
WATCH = """
window.states = [];
window.tracks = [];
const open = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
navigator.mediaDevices.getUserMedia = async (wanted) => {
  const stream = await open(wanted);
  window.tracks.push(...stream.getTracks());
  return stream;
};
addEventListener("DOMContentLoaded", () => {
  const shown = document.querySelector("#talk-state");
  const note = () => {
    window.states.push(shown.textContent);
    if (shown.textContent === "Thinking") window.tracks.forEach((track) => (track.enabled = false));
  };
  new MutationObserver(note).observe(shown, { childList: true });
});
"""
"""Notes every state that is shown, and the microphones that were opened. They are silent
after a question: the user waits for the answer, however long it takes."""


@pytest.fixture
def page(browser: Browser, server: ScriptedServer) -> Iterator[WebPage]:
    server.generator.script = LONG_ANSWER
    page = browser.open(f"{server.url}#conversation", script=WATCH)
    page.wait_ready()
    yield page
    page.js("document.querySelector('#tab-chat').click()")  # the microphone hears nobody any more


def wait_for_state(page: WebPage, state: str) -> None:
    page.wait(f"window.states.includes('{state}')")


def events(page: WebPage, kind: str) -> list[dict[str, Any]]:
    return [event for event in page.frames() if event["type"] == kind]


def microphones(page: WebPage) -> list[str]:
    states: list[str] = page.js("window.tracks.map(track => track.readyState)")
    return states


def test_user_talks_interrupts_and_stops_and_sees_what_happens(page: WebPage, server: ScriptedServer) -> None:
    assert page.texts("#talk-state") == ["Ready"]
    page.click("#talk-toggle")
    # Nobody touches the page: the answer begins when the user pauses, and ends when the user speaks again.
    wait_until(lambda: page.num_samples() == len(MINUTE))
    page.js("window.tracks.forEach(track => (track.enabled = true))")
    page.wait("document.querySelectorAll('.talk-turn.user').length >= 2")
    page.wait("document.querySelectorAll('.talk-turn.assistant').length >= 2")
    wanted = ["Connecting", "Listening", "You are speaking", "Thinking", "Speaking", "You are speaking"]
    assert page.js("window.states")[: len(wanted)] == wanted
    assert page.js("window.stoppedSounds") > 0
    assert page.texts(".talk-turn.assistant .text")[0] == "I could go on."
    assert page.texts(".talk-turn.assistant .note")[0] == "Interrupted"

    page.click("#talk-toggle")
    assert page.texts("#talk-state") == ["Stopped"]
    assert page.texts("#talk-toggle") == ["Start"]
    assert page.texts("#talk-problem") == []
    truncated = events(page, "conversation.item.truncate")[0]
    assert 0 < truncated["audio_end_ms"] < 10_000  # what was heard of a minute
    (session,) = (event["session"] for event in events(page, "session.update"))
    assert session["audio"]["output"]["voice"] == "Chelsie"
    # The first answer is cut in what the model reads of it, too.
    heard = [m for r in server.generator.requests for m in r.messages if m.role == "assistant"]
    assert [part.text for message in heard for part in message.content] != ["I could go on."]  # type: ignore[union-attr]
    assert microphones(page) == ["ended"]


def test_button_interrupts_and_the_server_stops_working(page: WebPage, server: ScriptedServer) -> None:
    server.generator.script = [*LONG_ANSWER[:2], Hang()]
    page.click("#talk-toggle")
    wait_for_state(page, "Speaking")
    page.click("#talk-interrupt")
    assert page.texts("#talk-state") == ["Listening"]
    page.wait("window.stoppedSounds > 0")
    assert [
        event["type"] for event in page.frames() if event["type"].startswith(("response.", "conversation."))
    ] == ["response.cancel", "conversation.item.truncate"]


def test_settings_count_and_leaving_the_tab_turns_the_microphone_off(
    page: WebPage, server: ScriptedServer
) -> None:
    page.settle(instructions="Be brief.", max_tokens="20")
    page.click("#writes-down")
    page.click("#talk-toggle")
    wait_for_state(page, "Speaking")  # the request has been sent
    (session,) = (event["session"] for event in events(page, "session.update"))
    assert session["instructions"] == "Be brief."
    assert session["max_output_tokens"] == 20
    assert session["audio"]["input"]["transcription"] is None
    assert server.generator.last_request.sampling["thinker"].max_tokens == 20

    page.click("#tab-chat")
    page.click("#tab-conversation")
    assert page.texts("#talk-state") == ["Stopped"]
    assert microphones(page) == ["ended"]


def test_a_model_that_understands_no_speech_says_so_and_writes_nothing_down(
    page: WebPage, server: ScriptedServer
) -> None:
    server.generator.model_info = replace(MODEL, about=AboutModel(understands_speech=False))
    page.browser.driver.refresh()
    page.wait_ready()
    assert page.texts("#talk-problem") == [
        "This model does not understand speech: it cannot answer what you say. Ask it in the chat."
    ]
    page.click("#talk-toggle")
    wait_for_state(page, "Speaking")
    assert page.texts(".talk-turn.user .text")[0] == "(spoken)"
    assert not any(isinstance(task, Transcribe) for task in server.generator.tasks)


def test_refused_microphone_and_failed_answer_are_told(
    page: WebPage, browser: Browser, server: ScriptedServer
) -> None:
    server.generator.submit_error = InvalidRequestError("The prompt is too long.")
    page.click("#talk-toggle")
    page.wait("!document.querySelector('#talk-problem').hidden")
    assert page.texts("#talk-problem") == ["The prompt is too long."]

    page = browser.open(f"{server.url}#conversation", microphone="denied")
    page.wait_ready()
    page.click("#talk-toggle")
    page.wait("!document.querySelector('#talk-problem').hidden")
    assert "does not let this page use the microphone" in page.text("#talk-problem")
    assert page.texts("#talk-state") == ["Stopped"]


def test_missing_key_is_asked_for_and_the_end_of_the_server_told(
    page: WebPage, server: ScriptedServer
) -> None:
    server.key = "right"
    page.click("#talk-toggle")
    page.wait("document.querySelector('#key-dialog').open")
    page.find("#key").send_keys("right\n")
    wait_for_state(page, "Listening")

    server.state.draining.set()
    page.wait("!document.querySelector('#talk-problem').hidden")
    assert page.texts("#talk-problem") == ["The server is shutting down."]
    assert page.texts("#talk-state") == ["Stopped"]
    assert microphones(page) == ["ended"]
