"""What the browser keeps: settings, and earlier chats."""

from tests.browser.browser import MEDIA, WebPage
from tests.browser.scripted_server import ScriptedServer
from tests.unit.api.fake_generator import TEXT


def reload(page: WebPage) -> None:
    page.browser.driver.refresh()
    page.wait_ready()


def test_settings_reach_the_request_and_survive_a_reload(page: WebPage, server: ScriptedServer) -> None:
    page.settle(instructions="Answer in two sentences.", temperature="0.5", max_tokens="40")
    page.click("#settings-button")
    page.find("#settings-voice").send_keys("Ethan")
    page.click("#settings-dialog .primary")
    reload(page)
    page.ask("Hello")
    page.wait_answered()
    (body,) = page.questions()
    assert body["messages"] == [
        {"role": "system", "content": "Answer in two sentences."},
        {"role": "user", "content": "Hello"},
    ]
    assert (body["temperature"], body["max_completion_tokens"]) == (0.5, 40)
    assert body["audio"]["voice"] == "Ethan"
    sampling = server.generator.last_request.sampling["thinker"]
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 40)

    page.click("#settings-button")
    assert page.js("document.querySelector('#temperature').value") == "0.5"
    page.click("#settings-reset")
    page.click("#settings-dialog .primary")
    page.ask("And now?")
    page.wait_answered(2)
    last = page.questions()[-1]
    assert last["messages"][0]["role"] == "user"
    assert not {"temperature", "max_completion_tokens"} & set(last)


def test_chat_survives_a_reload_and_goes_on(page: WebPage) -> None:
    page.choose(MEDIA / "shapes.png")
    page.ask("What is this?")
    page.wait_answered()
    reload(page)
    assert page.texts(".question .text") == ["What is this?"]
    assert page.texts(".question .file") == ["shapes.png"]
    assert page.texts(".answer > .text") == [TEXT]
    assert "text only" in page.texts("#restored")[0]
    page.ask("And that?")
    page.wait_answered(2)
    assert [message["content"] for message in page.questions()[-1]["messages"]] == [
        "[image, no longer available] What is this?",
        TEXT,
        "And that?",
    ]
    assert "data:" not in page.js("localStorage['omni-server.history']")


def test_earlier_chat_can_be_opened_again_and_deleted(page: WebPage) -> None:
    for question in ("First?", "Second?"):
        page.ask(question)
        page.wait_answered()
        page.click("#new-button")
    reload(page)
    assert page.texts(".turn") == []
    page.click("#history-button")
    assert page.texts("#history-list .title") == ["Second?", "First?"]
    page.click("#history-list li:nth-child(2) .open")
    assert page.texts(".question .text") == ["First?"]

    page.click("#history-button")
    page.click("[aria-label='Delete “First?”']")
    assert page.texts("#history-list .title") == ["Second?"]
    page.click("#history-close")
    assert page.texts(".turn") == []  # the chat that was deleted is not shown any more


def test_history_can_be_cleared(page: WebPage) -> None:
    page.ask("Hello")
    page.wait_answered()
    page.click("#history-button")
    page.click("#history-clear")
    assert page.texts("#history-empty") == ["There are no earlier chats."]
    page.click("#history-close")
    assert page.js("localStorage['omni-server.history']") is None
    reload(page)
    assert page.texts(".turn, #history-button") == []


def test_page_works_with_a_storage_that_others_have_written(page: WebPage) -> None:
    for kept in ("{", "7", '[{"id": 1}, null, {"id": "a", "changed": 1, "turns": [{"question": 2}]}]'):
        page.js(
            "['history', 'settings'].forEach(name => (localStorage[`omni-server.${name}`] = arguments[0]))",
            kept,
        )
        page.js("sessionStorage.setItem('omni-server.open-chat', 'a')")
        reload(page)
        assert page.texts(".turn, #history-button") == []
    page.ask("Hello")
    page.wait_answered()
    assert page.texts(".answer > .text") == [TEXT]


def test_oldest_chats_make_room(page: WebPage) -> None:
    page.js(
        """localStorage.setItem('omni-server.history', JSON.stringify(Array.from({ length: 60 }, (_, i) => ({
             id: `${i}`, changed: 60 - i, turns: [{ question: `${i}`, media: [], answer: 'x'.repeat(30000) }] }))))"""
    )
    page.ask("Hello")
    page.wait_answered()
    assert page.js("localStorage['omni-server.history'].length <= 1e6")
    questions = page.js("JSON.parse(localStorage['omni-server.history']).map(chat => chat.turns[0].question)")
    assert questions[:2] == ["Hello", "0"]
    assert 20 < len(questions) <= 50
