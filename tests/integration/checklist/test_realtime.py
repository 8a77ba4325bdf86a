"""Rows R01 to R25: `/v1/realtime`. Every event that is read is of a known type (R20) and has an id of its own
(R21)."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import websockets
from websockets.sync.client import connect

from tests.integration.checklist.guarded import KEY
from tests.integration.checklist.realtime_session import MANUAL, Session, opened, session_of
from tests.integration.server_process import MODEL, ServerProcess
from tests.unit.api.realtime.realtime_client import Event

BROWSER_KEY = f"openai-insecure-api-key.{KEY}"


def test_r02_browser_gives_its_key_as_a_subprotocol(guarded: ServerProcess) -> None:
    with session_of(guarded.url, subprotocols=["realtime", BROWSER_KEY]) as talk:
        assert talk.socket.subprotocol == "realtime"
        assert talk.next()["type"] == "session.created"


def refused_upgrade(url: str, query: str = f"?model={MODEL}", **options: Any) -> tuple[int, Any]:
    """Status and body of the answer to an upgrade that fails."""
    address = f"{url.replace('http', 'ws', 1)}/v1/realtime{query}"
    with pytest.raises(websockets.InvalidStatus) as refused:
        connect(address, proxy=None, **options)
    return refused.value.response.status_code, json.loads(refused.value.response.body or b"")


WRONG_KEYS: dict[str, dict[str, Any]] = {
    "R03 none": {},
    "R03 wrong": {"additional_headers": {"Authorization": "Bearer sk-wrong"}},
    "R03 wrong subprotocol": {"subprotocols": ["realtime", "openai-insecure-api-key.sk-wrong"]},
}


@pytest.mark.parametrize("row", WRONG_KEYS)
def test_without_a_key_the_upgrade_is_a_401(guarded: ServerProcess, row: str) -> None:
    status, body = refused_upgrade(guarded.url, **WRONG_KEYS[row])
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


def test_r04_unknown_model_is_refused_at_the_upgrade(server: ServerProcess) -> None:
    status, body = refused_upgrade(server.url, "?model=gpt-realtime")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


@pytest.fixture(scope="module")
def talk(server: ServerProcess) -> Any:
    """One session for rows that leave it as they found it, apart from its conversation."""
    with opened(server.url, audio=MANUAL, max_output_tokens=12) as talk:
        yield talk


def check_done(events: list[Event]) -> Event:
    """The response at its end, with usage in full."""
    response: Event = events[-1]["response"]
    usage = response["usage"]
    assert response["status"] in ("completed", "incomplete")  # the model may come to its limit
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_token_details"].keys() >= {"text_tokens", "audio_tokens", "cached_tokens"}
    assert usage["output_token_details"].keys() >= {"text_tokens", "audio_tokens"}
    return response


def test_r19_metadata_is_echoed(talk: Session) -> None:
    talk.say("Hello, who are you?")
    events = talk.response(metadata={"client_event_id": "abc"}, max_output_tokens=2)
    assert events[0]["type"] == "response.created"
    assert events[0]["response"]["metadata"] == {"client_event_id": "abc"}


MALFORMED: dict[str, str | bytes] = {
    "R22 not JSON": "{",
    "R22 unknown type": '{"type":"nonsense","event_id":"mine"}',
    "R22 no type": '{"event_id":"mine"}',
    "R22 binary": bytes(range(256)),
}


@pytest.mark.parametrize("row", MALFORMED)
def test_malformed_frame_is_an_error_and_the_session_goes_on(talk: Session, row: str) -> None:
    talk.socket.send(MALFORMED[row])
    error = talk.until("error")["error"]
    assert error["type"] == "invalid_request_error"
    assert error["event_id"] == ("mine" if "mine" in str(MALFORMED[row]) else None)  # R21
    talk.send("input_audio_buffer.clear")
    assert talk.next()["type"] == "input_audio_buffer.cleared"


def test_r25_sessions_know_nothing_of_each_other(server: ServerProcess) -> None:
    with ExitStack() as stack:
        talks = [stack.enter_context(opened(server.url, max_output_tokens=12)) for _ in range(2)]
        talks[0].configure(instructions="Be rude.")
        assert talks[1].configure()["instructions"] == ""
        for talk in talks:
            talk.say("Hello, who are you?")
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(Session.response, talks))
        responses = [check_done(talk.events) for talk in talks]
        ids = [{event["response_id"] for event in talk.events if "response_id" in event} for talk in talks]
        assert ids == [{response["id"]} for response in responses]
        assert responses[0]["usage"]["input_tokens"] != responses[1]["usage"]["input_tokens"]
