"""The page at /docs, with nothing but the server to load from."""

from tests.browser.browser import Browser
from tests.browser.scripted_server import ScriptedServer


def test_docs_show_and_try_the_api_without_any_other_host(browser: Browser, server: ScriptedServer) -> None:
    page = browser.open(server.url + "docs")
    page.wait("document.querySelectorAll('.opblock').length > 10")
    assert "/v1/chat/completions" in page.texts(".opblock-summary-path")
    page.click("[id*='list_models_v1_models'] button")
    page.wait("document.querySelector('.try-out__btn') !== null")
    page.click(".try-out__btn")
    page.click("button.execute")
    page.wait(
        "document.querySelector('.live-responses-table tr.response .response-col_status')?.textContent === '200'"
    )
    assert {
        request["url"].split("/")[2] for request in page.requests() if request["url"].startswith("http")
    } == {server.url.split("/")[2]}
    assert page.console() == []
