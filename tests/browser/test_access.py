"""Keyboard, names for screen readers, small screens, motion."""

from typing import Any

from selenium.webdriver.common.keys import Keys

from tests.browser.browser import MEDIA, WebPage
from tests.browser.scripted_server import ScriptedServer
from tests.unit.api.fake_generator import TEXT

CONTROLS = {
    "button",
    "textbox",
    "combobox",
    "switch",
    "checkbox",
    "spinbutton",
    "link",
    "DisclosureTriangle",
    "tab",
}


def accessible_controls(page: WebPage) -> list[tuple[str, str]]:
    """Role and name of every control, as assistive technology sees them."""
    nodes: list[dict[str, Any]] = page.browser.cdp("Accessibility.getFullAXTree")["nodes"]
    roles = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"]
    ]
    return [(role, name) for role, name in roles if role in CONTROLS]


def test_every_control_has_a_name(page: WebPage) -> None:
    page.choose(MEDIA / "speech_hello.wav")
    page.ask("Hello")
    page.wait_answered()
    page.choose(MEDIA / "shapes.png")
    controls = accessible_controls(page)
    assert [role for role, name in controls if not name.strip()] == []
    names = {name for _, name in controls}
    assert {"Question", "Attach a file", "Speak your question", "Send", "Answer by voice", "Voice"} <= names
    assert {"Play the answer", "Save the answer", "Remove shapes.png", "New chat", "History"} <= names
    assert {"Chat", "Conversation", "Read aloud", "Transcribe", "Settings", "Help"} <= names


def test_question_can_be_asked_with_the_keyboard_alone(page: WebPage, server: ScriptedServer) -> None:
    reached: list[str] = []
    for _ in range(12):
        page.browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.js("document.activeElement.id"))
        if reached[-1] == "text":
            break
    assert reached[-1] == "text", reached
    page.browser.driver.switch_to.active_element.send_keys(
        "One", Keys.SHIFT + Keys.ENTER + Keys.NULL, "two", Keys.ENTER
    )
    page.wait_answered()
    assert page.questions()[0]["messages"][0]["content"] == "One\ntwo"
    for wanted in ("attach", "mic", "speak", "voice"):
        page.browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        assert page.js("document.activeElement.id") == wanted


def test_screen_reader_hears_what_is_not_spoken(page: WebPage, server: ScriptedServer) -> None:
    page.ask("Hello")
    page.wait_answered()
    assert page.text("#announcer") == "The answer is complete"
    page.click("#speak")
    page.ask("Hello")
    page.wait_answered(2)
    assert page.text("#announcer") == TEXT
    assert page.js("document.querySelector('#announcer').getAttribute('role')") == "status"
