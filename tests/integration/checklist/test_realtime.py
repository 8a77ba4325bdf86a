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
from tests.integration.test_realtime import ATTEMPTS, speech
from tests.omni_families import OmniFamily
from tests.unit.api.realtime.answers import CLOSING, OPENING, SPOKEN_CLOSING
from tests.unit.api.realtime.realtime_client import Event, audio_of, base64_of

PCM = {"type": "audio/pcm", "rate": 24000}
BROWSER_KEY = f"openai-insecure-api-key.{KEY}"


def test_r01_session_begins_with_its_full_object(guarded: ServerProcess) -> None:
    with session_of(guarded.url, additional_headers={"Authorization": f"Bearer {KEY}"}) as talk:
        event = talk.next()
    assert event["type"] == "session.created"
    session = event["session"]
    assert (session["type"], session["object"], session["model"]) == ("realtime", "realtime.session", MODEL)
    assert session.keys() >= {"id", "expires_at", "instructions", "tools", "tool_choice", "max_output_tokens"}
    assert session["output_modalities"] == ["audio"]
    assert session["audio"]["input"]["turn_detection"]["type"] == "server_vad"
    assert session["audio"]["input"]["format"] == session["audio"]["output"]["format"] == PCM


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


def test_r05_update_changes_only_what_it_names(server: ServerProcess, family: OmniFamily) -> None:
    with opened(server.url) as talk:
        before = talk.events[0]["session"]
        voice = family.voices[-1]
        assert before["audio"]["output"]["voice"] == family.default_voice != voice
        after = talk.configure(instructions="Be brief.", audio={"output": {"voice": voice}})
        assert after == before | {
            "instructions": "Be brief.",
            "audio": before["audio"] | {"output": before["audio"]["output"] | {"voice": voice}},
        }
        manual = talk.configure(audio=MANUAL)
        assert manual["audio"]["input"]["turn_detection"] is None
        assert (manual["instructions"], manual["audio"]["output"]["voice"]) == ("Be brief.", voice)


BAD_UPDATES: dict[str, tuple[dict[str, Any], str]] = {
    "R06 rate": (
        {"type": "realtime", "audio": {"input": {"format": PCM | {"rate": 16000}}}},
        "audio.input.format.rate",
    ),
    "R06 no type": ({"instructions": "Be rude."}, "type"),
    "R06 unknown type": ({"type": "transcription", "instructions": "Be rude."}, "type"),
}


@pytest.mark.parametrize("row", BAD_UPDATES)
def test_bad_update_changes_nothing(server: ServerProcess, row: str) -> None:
    session, param = BAD_UPDATES[row]
    with opened(server.url) as talk:
        assert talk.refused("session.update", session=session)["param"] == f"session.{param}"
        assert talk.configure() == talk.events[0]["session"]


@pytest.fixture(scope="module")
def talk(server: ServerProcess) -> Any:
    """One session for rows that leave it as they found it, apart from its conversation."""
    with opened(server.url, audio=MANUAL, max_output_tokens=12) as talk:
        yield talk


def types_of(events: list[Event]) -> list[str]:
    return [event["type"] for event in events]


def check_done(events: list[Event]) -> Event:
    """The response at its end, with usage in full."""
    response: Event = events[-1]["response"]
    usage = response["usage"]
    assert response["status"] in ("completed", "incomplete")  # the model may come to its limit
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_token_details"].keys() >= {"text_tokens", "audio_tokens", "cached_tokens"}
    assert usage["output_token_details"].keys() >= {"text_tokens", "audio_tokens"}
    return response


def test_r07_text_response_comes_in_order(talk: Session) -> None:
    talk.say("Hello, who are you?")
    events = talk.answer(output_modalities=["text"])
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    wanted = [*OPENING, *["response.output_text.delta"] * len(deltas), "response.output_text.done", *CLOSING]
    assert types_of(events) == wanted
    (item,) = check_done(events)["output"]
    assert item["content"][0]["type"] == "output_text"
    assert item["content"][0]["text"] == "".join(deltas) != ""


def test_r08_spoken_response_comes_in_order(talk: Session) -> None:
    talk.say("Hello, who are you?")
    events = talk.answer()
    types = types_of(events)
    assert types[:4] == OPENING
    assert types[-6:] == SPOKEN_CLOSING
    assert set(types[4:-6]) == {"response.output_audio.delta", "response.output_audio_transcript.delta"}
    deltas = [event["delta"] for event in events if event["type"] == "response.output_audio_transcript.delta"]
    (done,) = (event for event in events if event["type"] == "response.output_audio_transcript.done")
    assert done["transcript"] == "".join(deltas) != ""
    assert audio_of(events)  # every delta of whole samples
    assert check_done(events)["output"][0]["content"][0]["transcript"] == done["transcript"]


def test_r09_sound_is_committed_by_hand_and_answered(family: OmniFamily, talk: Session) -> None:
    talk.play(speech("speech_hello.wav"))
    first = len(talk.events)
    talk.send("input_audio_buffer.commit")
    talk.until("conversation.item.done")
    committed, added, done = talk.events[first:]
    assert types_of([committed, added]) == ["input_audio_buffer.committed", "conversation.item.added"]
    assert committed["item_id"] == added["item"]["id"] == done["item"]["id"]
    response = check_done(talk.response(output_modalities=["text"]))
    assert response["usage"]["input_token_details"]["audio_tokens"] >= family.speech_tokens[0]


def test_r10_nothing_to_commit(talk: Session) -> None:
    assert talk.refused("input_audio_buffer.commit")["code"] == "input_audio_buffer_commit_empty"


def test_r13_cancelled_response_ends_and_nothing_of_it_comes_later(server: ServerProcess) -> None:
    with opened(server.url) as talk:
        talk.say("Tell me a long story.")
        for _ in range(ATTEMPTS):
            response_id = talk.begin()
            talk.send("response.cancel")
            done = talk.until("response.done")["response"]
            if done["status"] == "cancelled":
                break
            talk.until("error")  # it had come to its end before
        assert (done["id"], done["status"]) == (response_id, "cancelled")
        assert done["status_details"]["reason"] == "client_cancelled"
        last = len(talk.events)
        talk.response(max_output_tokens=4)
        assert not [event for event in talk.events[last:] if event.get("response_id") == response_id]


def test_r14_nothing_to_cancel(talk: Session) -> None:
    error = talk.refused("response.cancel")
    assert error["code"] == "response_cancel_not_active"
    assert error["message"].startswith("Cancellation failed: no active response found")


def test_r15_one_response_at_a_time(server: ServerProcess) -> None:
    with opened(server.url) as talk:
        talk.say("Tell me a long story.")
        talk.send("response.create")
        assert talk.refused("response.create")["code"] == "conversation_already_has_active_response"
        talk.send("response.cancel")
        talk.until("response.done")


def prompt_tokens(talk: Session) -> int:
    """Of the conversation as it is, without an answer to it."""
    done = check_done(talk.response(conversation="none", output_modalities=["text"], max_output_tokens=1))
    count: int = done["usage"]["input_tokens"]
    return count


def test_r16_text_that_was_cut_is_not_read_later(talk: Session) -> None:
    talk.say("Hello, who are you?")
    before = prompt_tokens(talk)
    (item,) = check_done(talk.answer())["output"]
    whole = prompt_tokens(talk)
    talk.send("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=0)
    assert talk.until("conversation.item.truncated")["item_id"] == item["id"]
    assert before <= prompt_tokens(talk) < whole


def test_r17_what_cannot_be_truncated(talk: Session) -> None:
    user_id = talk.say("Hello, who are you?")
    (item,) = check_done(talk.answer())["output"]
    fields = {"content_index": 0, "audio_end_ms": 100_000}
    error = talk.refused("conversation.item.truncate", item_id="nothing", **fields)
    assert error["code"] == "item_truncate_invalid_item_id"
    assert talk.refused("conversation.item.truncate", item_id=user_id, **fields)["param"] == "content_index"
    error = talk.refused("conversation.item.truncate", item_id=item["id"], **fields)
    assert error["param"] == "audio_end_ms"
    assert error["message"].endswith("is already shorter than 100000ms")


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


def test_r23_fifteen_mebibytes_in_one_event(talk: Session) -> None:
    talk.send("input_audio_buffer.append", audio=base64_of(bytes(14_000_000)))
    talk.send(
        "input_audio_buffer.append", audio=base64_of(bytes(15 * 1024 * 1024))
    )  # more than the model hears
    assert talk.until("error")["error"]["code"] == "input_audio_buffer_full"
    talk.send("input_audio_buffer.clear")
    talk.until("input_audio_buffer.cleared")


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
