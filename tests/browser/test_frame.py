"""What surrounds the tabs: the banner, the examples, the tabs themselves, the links."""

from dataclasses import replace
from itertools import product

import httpx2
from selenium.webdriver.common.keys import Keys

from omni_server.types import AboutModel, TextPart
from tests.browser.browser import Browser, WebPage
from tests.browser.scripted_server import ScriptedServer
from tests.unit.api.fake_generator import MODEL, VERSATILE_MODEL

ABOUT = AboutModel("This is a demo model. It knows little.", ("What are you?", "Count to three."))


def test_banner_and_examples_are_those_of_the_model(browser: Browser, server: ScriptedServer) -> None:
    server.generator.model_info = replace(MODEL, about=ABOUT)
    page = browser.open(server.url)
    page.wait_ready()
    assert page.texts("#banner") == ["This is a demo model. It knows little."]
    assert page.texts("#examples button") == ["What are you?", "Count to three."]
    page.click("#examples button:nth-child(2)")
    page.wait_answered()
    assert server.generator.last_request.messages[-1].content == (TextPart("Count to three."),)
    page.click("#tab-transcribe")
    assert page.texts("#banner") == ["This is a demo model. It knows little."]


def test_model_that_says_nothing_has_no_banner_and_usual_examples(page: WebPage) -> None:
    assert page.texts("#banner") == []
    assert len(page.texts("#examples button")) == 3


def test_tabs_are_chosen_by_keys_and_kept_in_the_address(page: WebPage) -> None:
    page.find("#tab-chat").send_keys(Keys.ARROW_LEFT)
    assert page.js("document.activeElement.id") == "tab-transcribe"
    page.browser.driver.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    assert page.js("location.hash") == "#read-aloud"
    page.browser.driver.refresh()
    page.wait_ready()
    assert page.js(
        "[...document.querySelectorAll('[role=tabpanel]')].filter(e => !e.hidden).map(e => e.id)"
    ) == ["read-aloud"]
    assert page.js("document.querySelector('[role=tab][aria-selected=true]').textContent") == "Read aloud"


def test_links_lead_to_pages_of_this_server(page: WebPage) -> None:
    page.click("#help-button")
    links = page.js(
        "[...document.querySelectorAll('#help-dialog a')].map(link => [link.textContent, link.href])"
    )
    assert [name for name, _ in links] == ["Guide", "API reference", "OpenAPI document"]
    for _, address in links:
        assert address.startswith(page.js("location.origin"))
        assert httpx2.get(address).status_code == 200
    page.click("#help-dialog a")
    assert page.text("h1") == "Guide"
    page.click("main a")
    page.wait_ready()
    assert page.console() == []


def test_an_empty_chat_begins_with_its_microphone(browser: Browser, server: ScriptedServer) -> None:
    examples = tuple(f"Here is example {number}." for number in range(8))
    server.generator.model_info = replace(MODEL, about=AboutModel(f"{ABOUT.notice} " * 3, examples))
    page = browser.open(server.url)
    for width, height in ((360, 640), (390, 664), (390, 844), (844, 390), (1280, 600), (1920, 1080)):
        browser.emulate(width, height)
        browser.driver.refresh()
        page.wait_ready()
        shown = "document.querySelector('#chat-scroll').getBoundingClientRect()"
        boxes = page.js(
            """['#big-mic', '#welcome h2'].map(name => document.querySelector(name))
               .filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect()).map(b => [b.top, b.bottom])"""
        )
        assert len(boxes) == (1 if height == 390 else 2)
        assert all(page.js(f"{shown}.top") <= top for top, _ in boxes)
        assert all(bottom <= page.js(f"{shown}.bottom") for _, bottom in boxes)
        assert page.js("document.querySelector('#tabs').offsetHeight") < 50  # one line


def test_every_tab_fits_every_screen(browser: Browser, server: ScriptedServer) -> None:
    server.generator.model_info = replace(VERSATILE_MODEL, about=ABOUT)
    page = browser.open(server.url)
    page.wait_ready()
    for tab, (width, height) in product(
        ("conversation", "read-aloud", "transcribe", "images"),
        ((360, 640), (390, 844), (844, 390), (1280, 800)),
    ):
        page.browser.emulate(width, height)
        page.click(f"#tab-{tab}")
        assert page.js("document.documentElement.scrollWidth") == width
        assert page.js(f"document.querySelector('#{tab}').scrollWidth") <= width
        boxes = page.js(
            f"""[...document.querySelectorAll('header button, .switch'),
                ...document.querySelectorAll('#{tab} :is(button, select, textarea, input[type=number])')]
               .filter(e => e.checkVisibility()).map(e => [e.id, e.getBoundingClientRect()])
               .map(([id, box]) => [id, box.left, box.right, box.height])"""
        )
        assert [name for name, left, right, _ in boxes if left < 0 or right > width] == []
        assert [name for name, _, _, height in boxes if height < 31] == []  # a finger must find it
