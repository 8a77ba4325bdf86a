"""What surrounds the tabs: the banner, the examples, the tabs themselves, the links."""

from dataclasses import replace
from itertools import product

import httpx2

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


def test_every_tab_fits_every_screen(browser: Browser, server: ScriptedServer) -> None:
    server.generator.model_info = replace(VERSATILE_MODEL, about=ABOUT)
    page = browser.open(server.url)
    page.wait_ready()
    for tab, (width, height) in product(
        ("chat", "conversation", "read-aloud", "transcribe", "images"),
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
