"""Keyboard, names for screen readers, small screens, motion."""

from dataclasses import replace
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from omni_server.types import TextDelta
from tests.browser.browser import MEDIA, WebPage
from tests.browser.scripted_server import ScriptedServer
from tests.unit.api.fake_generator import TEXT, Hang

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


def test_focus_can_be_seen(page: WebPage) -> None:
    page.find("#text").send_keys(Keys.TAB)
    outline = page.js("getComputedStyle(document.activeElement).outline")
    assert "solid" in outline
    assert "2px" in outline


def test_screen_reader_hears_what_is_not_spoken(page: WebPage, server: ScriptedServer) -> None:
    page.ask("Hello")
    page.wait_answered()
    assert page.text("#announcer") == "The answer is complete"
    page.click("#speak")
    page.ask("Hello")
    page.wait_answered(2)
    assert page.text("#announcer") == TEXT
    assert page.js("document.querySelector('#announcer').getAttribute('role')") == "status"


@pytest.mark.parametrize(("width", "height"), [(360, 640), (390, 844), (844, 390), (1280, 860)])
def test_everything_fits_the_screen(page: WebPage, server: ScriptedServer, width: int, height: int) -> None:
    long_name = "an-organisation/a-model-with-a-rather-long-name-7B-Instruct"
    server.generator.model_info = replace(server.generator.model_info, name=long_name)
    page.browser.driver.refresh()
    page.wait_ready()
    page.browser.emulate(width, height)
    assert page.js("document.documentElement.scrollWidth") == width
    page.choose(MEDIA / "speech_hello.wav", MEDIA / "shapes.png")
    page.ask("W" * 200)
    page.wait_answered()
    page.click("#mic")
    page.wait("document.querySelector('#recording').checkVisibility()")
    for closed in (False, True):
        if closed:
            page.click("#record-cancel")
        assert page.js("document.documentElement.scrollWidth") == width
        assert page.js(
            "document.querySelector('main').scrollWidth <= document.querySelector('main').clientWidth"
        )
        outside = page.js(
            """[...document.querySelectorAll('header button, #composer button, #composer select, #composer textarea')]
               .filter(e => e.checkVisibility())
               .filter(e => { const r = e.getBoundingClientRect();
                              return r.left < 0 || r.right > innerWidth || r.top < 0 || r.bottom > innerHeight; })
               .map(e => e.id)"""
        )
        assert outside == []


def test_targets_are_large_enough_for_a_finger(page: WebPage) -> None:
    page.browser.emulate(360, 640)
    page.ask("Hello")
    page.wait_answered()
    sizes = page.js(
        """[...document.querySelectorAll('button, select, summary, .switch')].filter(e => e.checkVisibility())
           .map(e => [e.id || e.className, e.getBoundingClientRect()]).map(([n, r]) => [n, r.width, r.height])"""
    )
    assert [name for name, width, height in sizes if min(width, height) < 31] == []
    assert {name: min(w, h) for name, w, h in sizes if name in ("mic", "send", "attach")} == {
        "mic": 44,
        "send": 44,
        "attach": 44,
    }


@pytest.mark.parametrize("reduced", [True, False])
def test_nothing_moves_for_those_who_asked_for_that(
    page: WebPage, server: ScriptedServer, reduced: bool
) -> None:
    server.generator.script = [TextDelta("", (0,)), Hang()]
    page.browser.emulate(1280, 860, reduced_motion=reduced)
    page.ask("Hello")
    page.wait("document.querySelector('.thinking') !== null")
    assert (
        page.js("getComputedStyle(document.querySelector('.thinking i')).animationName") == "none"
    ) is reduced
    page.click("#stop")
    page.wait_answered()


@pytest.mark.parametrize(
    ("scheme", "page_color"), [("light", "rgb(250, 249, 246)"), ("dark", "rgb(20, 21, 19)")]
)
def test_page_follows_the_systems_scheme(page: WebPage, scheme: str, page_color: str) -> None:
    page.browser.emulate(1280, 860, scheme)
    assert page.js("getComputedStyle(document.documentElement).backgroundColor") == page_color
