"""What the page says when the server will not or cannot answer."""

from selenium.webdriver.common.keys import Keys

from omni_server.errors import InvalidRequestError
from tests.browser.browser import Browser, WebPage
from tests.browser.scripted_server import ScriptedServer
from tests.unit.api.fake_generator import TEXT


def test_draining_server_is_told_until_it_is_back(page: WebPage, server: ScriptedServer) -> None:
    server.state.draining.set()
    page.ask("Hello")
    page.wait("document.querySelector('.failure').checkVisibility()")
    assert page.texts(".failure p") == ["The server is shutting down."]
    page.wait("document.querySelector('#state-text').textContent === 'The server is shutting down.'")
    page.write("Are you there?")
    assert not page.find("#send").is_enabled()

    server.state.draining.clear()
    page.wait_ready()
    assert page.find("#send").is_enabled()
    page.find("#text").send_keys(Keys.ENTER)
    page.wait_answered(2)
    # What was not answered is no part of the conversation.
    assert [message["content"] for message in page.questions()[-1]["messages"]] == ["Are you there?"]


def test_page_waits_for_a_model_that_is_still_loading(browser: Browser, server: ScriptedServer) -> None:
    server.state.generator = None
    page = browser.open(server.url)
    page.wait("document.querySelector('#state-text').textContent === 'The model is still loading.'")
    assert not page.find("#big-mic").is_enabled()
    server.state.generator = server.generator
    page.wait_ready()
    assert page.find("#big-mic").is_enabled()


def test_refused_request_is_told_in_the_servers_words(page: WebPage, server: ScriptedServer) -> None:
    server.generator.submit_error = InvalidRequestError(
        "The prompt is too long.", code="context_length_exceeded"
    )
    page.ask("Hello")
    page.wait("document.querySelector('.failure').checkVisibility()")
    assert page.texts(".failure p") == ["The prompt is too long."]
    assert page.text("#announcer") == "The answer failed: The prompt is too long."
    page.wait_ready()


def test_key_is_asked_for_until_it_is_right_and_kept_in_the_tab_only(
    browser: Browser, server: ScriptedServer
) -> None:
    server.key = "right"
    page = browser.open(server.url)
    page.wait("document.querySelector('#key-dialog').open")
    assert page.text("#key-reason") == "This server requires an API key."
    assert page.js("document.activeElement.id") == "key"
    page.find("#key").send_keys("wrong", Keys.ENTER)
    page.wait(
        "document.querySelector('#key-reason').textContent.startsWith('The server has refused this key')"
    )
    page.wait("document.querySelector('#key-dialog').open")
    page.find("#key").send_keys("right", Keys.ENTER)
    page.wait_ready()
    assert not page.js("document.querySelector('#key-dialog').open")

    page.ask("Hello")
    page.wait_answered()
    assert page.text(".answer > .text") == TEXT
    assert page.js("sessionStorage['omni-server.api-key']") == "right"
    assert "right" not in page.js("JSON.stringify(localStorage)")
    assert page.js("document.cookie") == ""

    server.key = "changed"
    page.ask("And then?")
    page.wait("document.querySelector('#key-dialog').open")
    page.click("#key-cancel")
    page.wait_answered(2)
    assert page.texts(".failure p") == ["Incorrect API key provided."]
    page.click(".turn:nth-child(2) .retry")
    page.wait("document.querySelector('#key-dialog').open")
    page.find("#key").send_keys("changed", Keys.ENTER)
    page.wait_answered(3)
    assert len(page.texts(".failure")) == 1
