"""`/v1/responses`: OpenAI's objects and events, on the path of chats."""

import base64
import json
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.types import Message, Receive, Scope, Send

from omni_server.api.answer_store import AnswerStore
from omni_server.api.config import ApiConfig
from omni_server.errors import InvalidRequestError, StageDeadError
from omni_server.types import (
    FinishReason,
    OmniRequest,
    SampledToken,
    TextDelta,
    TextPart,
    TokenLogprob,
    ToolCallDelta,
)
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import (
    SPEECH,
    app_of,
    chat,
    data_url,
    error_of,
    http_client,
    response_body,
    tone,
)
from tests.unit.api.fake_generator import (
    IMAGE_MODEL,
    SAMPLES,
    TEXT,
    FakeGenerator,
    ScriptEntry,
    finished,
)

URL = "/v1/responses"
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
CHAT_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": CITY, "strict": True},
}
CALL = {"type": "function_call", "call_id": "call_a", "name": "weather", "arguments": '{"city": "Oslo"}'}
CHAT_CALL = {
    "id": "call_a",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}
CALLS: list[ScriptEntry] = [
    ToolCallDelta(0, "call_a", "weather", '{"city":'),
    ToolCallDelta(0, None, None, ' "Oslo"}'),
    ToolCallDelta(1, "call_b", "time", "{}"),
    finished("tool_calls"),
]
_EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


async def response_of(generator: FakeGenerator, given: Any = "hi", **fields: Any) -> dict[str, Any]:
    """A whole response, after what must hold for each."""
    async with http_client(app_of(generator)) as client:
        answer = await client.post(URL, json=response_body(given, **fields))
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    Response.model_validate(response)
    assert {type(response[name]) for name in ("created_at", "completed_at")} <= {int, type(None)}
    return response


async def events_of(generator: FakeGenerator, given: Any = "hi", **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed response, after what must hold for each stream."""
    async with http_client(app_of(generator)) as client:
        answer = await client.post(URL, json=response_body(given, stream=True, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events: list[dict[str, Any]] = []
    for frame in answer.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        _EVENTS.validate_python(events[-1])
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    return events


def types_of(events: list[dict[str, Any]]) -> list[str]:
    """Without the ones that open each stream; repeated ones once."""
    types = [event["type"].removeprefix("response.") for event in events[2:]]
    return [type for index, type in enumerate(types) if index == 0 or types[index - 1] != type]


MESSAGE = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]
FUNCTION_CALL = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]
SAME_REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": (response_body("hi"), chat("hi")),
    "instructions": (
        response_body("hi", instructions="Be brief."),
        chat(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]),
    ),
    "sampling": (
        response_body("hi", temperature=0.5, top_p=0.9, max_output_tokens=7, seed=3, top_k=5),
        chat("hi", temperature=0.5, top_p=0.9, max_completion_tokens=7, seed=3, top_k=5),
    ),
    "log-probabilities": (response_body("hi", top_logprobs=2), chat("hi", logprobs=True, top_logprobs=2)),
    "speech": (response_body("hi", **SPEECH), chat("hi", **SPEECH)),
    "schema": (
        response_body("hi", text={"format": {"type": "json_schema", "name": "city", "schema": CITY}}),
        chat("hi", response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}),
    ),
    "tools": (
        response_body("hi", tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}),
        chat("hi", tools=[CHAT_WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}}),
    ),
    "allowed tools": (
        response_body(
            "hi",
            tools=[WEATHER],
            tool_choice={
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}],
            },
        ),
        chat("hi", tools=[CHAT_WEATHER], tool_choice="required"),
    ),
    "media": (
        response_body(
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "hear"},
                        {"type": "input_audio", "input_audio": {"data": data_url(tone()), "format": "wav"}},
                    ],
                }
            ]
        ),
        chat(
            [
                {"type": "text", "text": "hear"},
                {"type": "input_audio", "input_audio": {"data": data_url(tone()), "format": "wav"}},
            ]
        ),
    ),
    "text behind a call": (
        response_body(
            [
                {"role": "user", "content": "hi"},
                CALL,
                {"role": "assistant", "content": "So."},
                {"type": "function_call_output", "call_id": "call_a", "output": "rain"},
            ],
            tools=[WEATHER],
        ),
        chat(
            messages=[
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "So.", "tool_calls": [CHAT_CALL]},
                {"role": "tool", "tool_call_id": "call_a", "content": "rain"},
            ],
            tools=[CHAT_WEATHER],
        ),
    ),
    "rounds of tools": (
        response_body(
            [
                {"role": "user", "content": "hi"},
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
                CALL,
                CALL | {"call_id": "call_b"},
                {"type": "function_call_output", "call_id": "call_b", "output": "rain"},
                {
                    "type": "function_call_output",
                    "call_id": "call_a",
                    "output": [{"type": "input_text", "text": "sun"}],
                },
            ],
            tools=[WEATHER],
        ),
        chat(
            messages=[
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": "So.",
                    "tool_calls": [CHAT_CALL, CHAT_CALL | {"id": "call_b"}],
                },
                {"role": "tool", "tool_call_id": "call_b", "content": "rain"},
                {"role": "tool", "tool_call_id": "call_a", "content": "sun"},
            ],
            tools=[CHAT_WEATHER],
        ),
    ),
}


@pytest.mark.parametrize("name", SAME_REQUESTS)
async def test_the_model_is_asked_as_by_a_chat(name: str) -> None:
    requests: list[OmniRequest] = []
    for url, sent in zip((URL, "/v1/chat/completions"), SAME_REQUESTS[name], strict=True):
        generator = FakeGenerator()
        async with http_client(app_of(generator)) as client:
            answer = await client.post(url, json=sent)
        assert answer.status_code == 200, answer.text
        request = generator.last_request
        output = request.structured_output and replace(request.structured_output, param="")
        requests.append(replace(request, request_id="", began_at=None, structured_output=output))
    assert repr(requests[0]) == repr(requests[1])


async def test_text_comes_as_one_message_and_its_events_in_order() -> None:
    events = await events_of(FakeGenerator())
    assert types_of(events) == [*MESSAGE, "completed"]
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == TEXT
    streamed, whole = events[-1]["response"], await response_of(FakeGenerator())
    assert whole["output"][0]["content"][0]["text"] == TEXT
    for response in (streamed, whole):
        for name in ("id", "created_at", "completed_at"):
            del response[name]
        del response["output"][0]["id"]
    assert streamed == whole
    assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]


@pytest.mark.parametrize("before", [[], [TextDelta("So.", (1,))]])
async def test_calls_come_one_after_another_behind_the_text(before: list[ScriptEntry]) -> None:
    events = await events_of(FakeGenerator(script=[*before, *CALLS]), tools=[WEATHER])
    message = MESSAGE if before else []
    assert types_of(events) == [*message, *FUNCTION_CALL, *FUNCTION_CALL, "completed"]
    calls = events[-1]["response"]["output"][len(before) :]
    assert [(call["name"], call["call_id"], call["arguments"]) for call in calls] == [
        ("weather", "call_a", '{"city": "Oslo"}'),
        ("time", "call_b", "{}"),
    ]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"][-2:] == calls
    assert {event["output_index"] for event in events if "output_index" in event} == set(
        range(len(before) + 2)
    )


async def test_speech_comes_beside_its_transcript() -> None:
    spoken = SPEECH | {"audio": {"voice": "Ethan", "format": "pcm16"}}
    events = await events_of(FakeGenerator(), **spoken)
    pieces = [event["delta"] for event in events if event["type"] == "response.audio.delta"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == TEXT
    assert "response.audio.done" in [event["type"] for event in events]
    whole = await response_of(FakeGenerator(), **spoken)
    data = base64.b64decode("".join(pieces))
    assert len(data) == 2 * len(SAMPLES)
    assert (base64.b64decode(whole["audio"]["data"]), whole["audio"]["format"]) == (data, "pcm16")


async def test_log_probabilities_of_a_call_do_not_cut_it() -> None:
    sampled = SampledToken(TokenLogprob("<", -0.5, b"<"), ())
    silent = TextDelta("", (1,), (sampled,))
    script = [silent, CALLS[0], silent, CALLS[1], silent, CALLS[3]]
    events = await events_of(FakeGenerator(script=script), tools=[WEATHER], top_logprobs=0)
    assert types_of(events) == [*FUNCTION_CALL, "completed"]
    assert events[-1]["response"]["output"][0]["arguments"] == '{"city": "Oslo"}'


@pytest.mark.parametrize("speech", [{}, SPEECH])
async def test_a_call_alone_is_not_spoken(speech: dict[str, Any]) -> None:
    generator = FakeGenerator(script=CALLS)
    events = await events_of(generator, tools=[WEATHER], **speech)
    assert types_of(events) == [*FUNCTION_CALL, *FUNCTION_CALL, "completed"]
    assert "audio" not in await response_of(generator, tools=[WEATHER], **speech)


async def test_an_answer_without_text_is_an_empty_message() -> None:
    response = await response_of(FakeGenerator(script=[finished()]))
    assert response["output"][0]["content"][0]["text"] == ""


async def test_an_answer_that_reaches_its_limit_is_incomplete() -> None:
    reason: FinishReason = "length"
    events = await events_of(FakeGenerator(script=[TextDelta("So", (1,)), finished(reason)]))
    assert types_of(events) == [*MESSAGE, "incomplete"]
    response = events[-1]["response"]
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize(
    ("error", "code"),
    [(StageDeadError("thinker", "it died"), "server_error"), (RuntimeError("odd"), "server_error")],
)
async def test_a_stream_that_fails_ends_with_its_error(error: Exception, code: str) -> None:
    events = await events_of(FakeGenerator(script=[TextDelta("So", (1,)), error]))
    assert types_of(events) == [*MESSAGE, "failed"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "So"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == code
    assert "odd" not in events[-1]["response"]["error"]["message"]


async def test_log_probabilities_are_in_events_and_in_the_message() -> None:
    events = await events_of(FakeGenerator(), include=["message.output_text.logprobs"])
    tokens = [
        token for event in events if event["type"].endswith("text.delta") for token in event["logprobs"]
    ]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == tokens


@pytest.mark.parametrize("by_id", [True, False])
async def test_a_conversation_goes_on_by_id_and_by_input(by_id: bool) -> None:
    generator = FakeGenerator(script=CALLS[:2] + CALLS[3:])
    output = {"type": "function_call_output", "call_id": "call_a", "output": "sun"}
    async with http_client(app_of(generator)) as client:
        first = (
            await client.post(URL, json=response_body(tools=[WEATHER], store=True, instructions="One."))
        ).json()
        assert first["store"] is True
        if by_id:
            rest = response_body([output], previous_response_id=first["id"])
        else:
            rest = response_body([{"role": "user", "content": "hi"}, *first["output"], output])
        assert (await client.post(URL, json=rest | {"instructions": "Two."})).status_code == 200
    messages = generator.last_request.messages
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[0].content == (TextPart("Two."),)
    assert [call.name for call in messages[2].tool_calls] == ["weather"]


@pytest.mark.parametrize(("store", "is_found"), [(None, True), (True, True), (False, False)])
async def test_items_can_be_referred_to_unless_the_client_wants_nothing_kept(
    store: bool | None, is_found: bool
) -> None:
    generator = FakeGenerator()
    async with http_client(app_of(generator)) as client:
        first = (await client.post(URL, json=response_body(store=store))).json()
        items = [
            {"type": "item_reference", "id": first["output"][0]["id"]},
            {"role": "user", "content": "so"},
        ]
        answer = await client.post(URL, json=response_body(items))
    if is_found:
        assert answer.status_code == 200
        assert generator.last_request.messages[0].content == (TextPart(TEXT),)
    else:
        assert error_of(answer)["param"] == "input[0].id"


@pytest.mark.parametrize("store", [None, False, True])
async def test_only_stored_responses_are_kept_until_they_are_deleted(store: bool | None) -> None:
    async with http_client(app_of(FakeGenerator())) as client:
        made = (await client.post(URL, json=response_body(store=store))).json()
        url = f"{URL}/{made['id']}"
        if store:
            assert (await client.get(url)).json() == made
            deleted = await client.delete(url)
            assert deleted.json() == {"id": made["id"], "object": "response", "deleted": True}
            items = [{"type": "item_reference", "id": made["output"][0]["id"]}]
            assert error_of(await client.post(URL, json=response_body(items)))["code"] == "item_not_found"
        assert error_of(await client.get(url), 404)["code"] == "response_not_found"
        assert error_of(await client.delete(url), 404)["code"] == "response_not_found"
        again = await client.post(URL, json=response_body(previous_response_id=made["id"]))
        assert error_of(again)["code"] == "previous_response_not_found"


async def test_a_stored_response_belongs_to_its_caller() -> None:
    app = app_of(FakeGenerator(), ApiConfig(api_keys=("a" * 20, "b" * 20)))
    async with http_client(app) as client:
        mine, other = ({"authorization": f"Bearer {key * 20}"} for key in "ab")
        made = (await client.post(URL, json=response_body(store=True), headers=mine)).json()
        assert (await client.get(f"{URL}/{made['id']}", headers=mine)).status_code == 200
        assert error_of(await client.get(f"{URL}/{made['id']}", headers=other), 404)


@pytest.mark.parametrize(
    "config",
    [ApiConfig(answer_store_entries=2), ApiConfig(answer_store_bytes=2500), ApiConfig(answer_store_ttl_s=0)],
)
async def test_what_is_kept_is_bounded_in_number_size_and_time(config: ApiConfig) -> None:
    async with http_client(app_of(FakeGenerator(), config)) as client:
        ids = [(await client.post(URL, json=response_body(store=True))).json()["id"] for _ in range(3)]
        assert (await client.get(f"{URL}/{ids[0]}")).status_code == 404
        is_kept = (await client.get(f"{URL}/{ids[2]}")).status_code == 200
    assert is_kept == (config.answer_store_ttl_s > 0)


@pytest.mark.parametrize("truncation", ["auto", "disabled", None])
async def test_a_conversation_that_is_too_long_loses_its_oldest_messages_if_it_may(
    truncation: str | None,
) -> None:
    generator = FakeGenerator()
    generator.submit_error = InvalidRequestError(
        "'messages' is too long.", param="messages", code="context_length_exceeded"
    )
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    async with http_client(app_of(generator)) as client:
        error = error_of(await client.post(URL, json=response_body(turns, truncation=truncation)))
    assert (error["param"], error["message"]) == ("input", "'input' is too long.")
    sizes = [len(request.messages) for request in generator.requests]
    assert sizes == ([3, 2, 1] if truncation == "auto" else [3])


REFUSED: list[tuple[dict[str, Any], str]] = [
    (response_body([]), "input"),
    (response_body(3), "input"),
    (response_body([{"type": "reasoning"}]), "input"),
    (response_body([{"type": "web_search_call", "id": "ws_1"}]), "input[0].type"),
    (
        response_body([{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]),
        "input[0].content[0].type",
    ),
    (
        response_body([{"role": "user", "content": [{"type": "input_image"}]}]),
        "input[0].content[0].image_url",
    ),
    (
        response_body(
            [{"role": "assistant", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}]
        ),
        "input[0].content[0].type",
    ),
    (
        response_body(
            [
                {"role": "user", "content": "a"},
                {"type": "function_call_output", "call_id": "x", "output": "1"},
            ]
        ),
        "input[1].role",
    ),
    (
        response_body([CALL, {"type": "function_call_output", "call_id": "x", "output": "1"}]),
        "input[1].call_id",
    ),
    (response_body(tools=[{"type": "web_search"}]), "tools[0].type"),
    (response_body(tools=[{"type": "computer_use_preview"}]), "tools[0].type"),
    (response_body(tools=[WEATHER, WEATHER]), "tools[1].name"),
    (response_body(tools=[WEATHER | {"parameters": {"type": "string"}}]), "tools[0].parameters"),
    (response_body(tools=[WEATHER], tool_choice={"type": "function", "name": "x"}), "tool_choice"),
    (response_body(tools=[WEATHER], tool_choice={"type": "mcp", "server_label": "x"}), "tool_choice.type"),
    (
        response_body(text={"format": {"type": "json_schema", "name": "a b", "schema": {}}}),
        "text.format.name",
    ),
    (
        response_body(text={"format": {"type": "json_schema", "name": "a", "schema": CITY}}, **SPEECH),
        "text.format",
    ),
    (response_body(modalities=["text", "audio"]), "audio"),
    (response_body(modalities=["image"]), "modalities[0]"),
    (response_body(tool_choice="required"), "tool_choice"),
    (response_body(text={"format": {"type": "json_schema", "name": "a"}}), "text.format.schema"),
    (response_body(background=True), "background"),
    (response_body(conversation="conv_1"), "conversation"),
    (response_body(prompt={"id": "p"}), "prompt"),
    (response_body(max_output_tokens=0), "max_output_tokens"),
    (response_body(top_logprobs=21), "top_logprobs"),
    (response_body(previous_response_id="resp_x"), "previous_response_id"),
    (response_body([{"id": "msg_x"}]), "input[0].id"),
    ({"model": "omni"}, "input"),
    (response_body() | {"model": "none"}, "model"),
]


@pytest.mark.parametrize(("sent", "param"), REFUSED, ids=range(len(REFUSED)))
async def test_what_is_refused_is_named_as_the_request_names_it(sent: dict[str, Any], param: str) -> None:
    generator = FakeGenerator()
    async with http_client(app_of(generator)) as client:
        error = error_of(await client.post(URL, json=sent), 404 if sent["model"] == "none" else 400)
    assert error["param"] == param
    assert "messages" not in error["message"].replace("Messages", "")
    assert generator.requests == []


async def test_a_model_that_only_generates_images_refuses_to_answer() -> None:
    generator = FakeGenerator(IMAGE_MODEL)
    async with http_client(app_of(generator)) as client:
        error = error_of(await client.post(URL, json=response_body()))
    assert error["param"] == "modalities"
    assert generator.requests == []


async def test_an_id_is_found_only_as_what_it_names() -> None:
    generator = FakeGenerator()
    async with http_client(app_of(generator)) as client:
        spoken = (await client.post("/v1/chat/completions", json=chat(**SPEECH))).json()
        audio_id = spoken["choices"][0]["message"]["audio"]["id"]
        made = (await client.post(URL, json=response_body(store=True))).json()
        for name in (audio_id, made["id"]):
            items = [{"type": "item_reference", "id": name}]
            assert error_of(await client.post(URL, json=response_body(items)))["code"] == "item_not_found"
        for name in (audio_id, made["output"][0]["id"]):
            assert error_of(await client.get(f"{URL}/{name}"), 404)
        messages = [{"role": "assistant", "audio": {"id": made["id"]}}, {"role": "user", "content": "so"}]
        answer = await client.post("/v1/chat/completions", json=chat(messages=messages))
        assert error_of(answer)["code"] == "audio_not_found"


async def test_a_stream_is_stored_before_its_last_event_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    add = AnswerStore.add

    def noted_add(store: AnswerStore, id: str, data: bytes) -> int:
        order.append(id.partition("_")[0])
        return add(store, id, data)

    monkeypatch.setattr(AnswerStore, "add", noted_add)
    app = app_of(FakeGenerator())

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_note(message: Message) -> None:
            if b"response.completed" in message.get("body", b""):
                order.append("sent")
            await send(message)

        await app(scope, receive, send_and_note)

    async with AsgiCall(noting, response_body(stream=True, store=True), path=URL) as call:
        await call.body_until(b"response.completed")
    assert order == ["input", "msg", "conversation", "resp", "sent"]


async def test_what_is_larger_than_the_store_evicts_nothing() -> None:
    async with http_client(app_of(FakeGenerator(), ApiConfig(answer_store_bytes=5000))) as client:
        small, large = [
            (await client.post(URL, json=response_body(text, store=True))).json()["id"]
            for text in ("hi", "x" * 5000)
        ]
        assert (await client.get(f"{URL}/{small}")).status_code == 200
        assert (await client.get(f"{URL}/{large}")).status_code == 404


async def test_a_previous_conversation_counts_as_a_body_until_the_answer_begins() -> None:
    config = ApiConfig(max_body_bytes=4000, max_total_body_bytes=4000)
    async with http_client(app_of(FakeGenerator(), config)) as client:
        first = (await client.post(URL, json=response_body("x" * 2000, store=True))).json()
        second = response_body("y" * 1000, store=True, previous_response_id=first["id"])
        answer = await client.post(URL, json=second)
        assert answer.status_code == 200, answer.text
        third = response_body("z" * 1000, previous_response_id=answer.json()["id"])
        assert error_of(await client.post(URL, json=third), 503)["code"] == "server_overloaded"
        assert (await client.post(URL, json=second)).status_code == 200


async def test_a_kept_conversation_takes_its_place_once() -> None:
    """Two of them fit, and each is kept in place of its input."""
    async with http_client(app_of(FakeGenerator(), ApiConfig(answer_store_bytes=9000))) as client:
        ids = [
            (await client.post(URL, json=response_body("x" * 2500, store=True))).json()["id"]
            for _ in range(2)
        ]
        for name in ids:
            assert (await client.get(f"{URL}/{name}")).status_code == 200
            rest = response_body("so", previous_response_id=name)
            assert (await client.post(URL, json=rest)).status_code == 200
