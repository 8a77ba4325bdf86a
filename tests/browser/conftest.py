"""One Chromium and one scripted server for all tests here; they end with the last of these tests."""

from collections.abc import Iterator

import pytest

from tests.browser.browser import Browser, WebPage
from tests.browser.scripted_server import ScriptedServer


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture(scope="package")
def running_scripted_server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def server(running_scripted_server: ScriptedServer) -> ScriptedServer:
    """As if it were new."""
    running_scripted_server.reset()
    return running_scripted_server


@pytest.fixture
def page(browser: Browser, server: ScriptedServer) -> WebPage:
    """The page of `server`, ready to ask."""
    page = browser.open(server.url)
    page.wait_ready()
    return page
