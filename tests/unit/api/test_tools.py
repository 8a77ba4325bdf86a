"""Tools: what of a request reaches the model, and how calls look in answers."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from omni_server.api.config import ApiConfig
from omni_server.api.media_loader import MediaLoader
from omni_server.api.messages import load_messages
from omni_server.api.schemas import CalledFunction, Message, PastToolCall
from omni_server.types import (
    AudioDelta,
    FinishReason,
    FunctionTool,
    SampledToken,
    TextDelta,
    TextPart,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    ToolUse,
)
from tests.unit.api.clients import SPEECH, app_of, chat, error_of, openai_client, post, request_for
from tests.unit.api.fake_generator import MODEL, SAMPLES, TEXT, FakeGenerator, ScriptEntry, finished
from tests.unit.api.schema import check_completion
from tests.unit.api.sse_validator import StreamedAnswer, read_stream
from tests.unit.api.test_bad_requests import allowed, named, tool

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = tool(name="weather", description="Wie ist das Wetter? ☀", parameters=PARAMETERS, strict=True)
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS: list[dict[str, Any]] = [WEATHER, TIME]

PCM16 = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "pcm16"}}
PARIS = '{"city": "Paris"}'
CALLS: list[ScriptEntry] = [
    ToolCallDelta(0, "call_a", "weather", ""),
    ToolCallDelta(0, None, None, '{"city": '),
    ToolCallDelta(0, None, None, '"Paris"}'),
    ToolCallDelta(1, "call_b", "time", ""),
    ToolCallDelta(1, None, None, "{}"),
]
EXPECTED_CALLS = [("call_a", "weather", PARIS), ("call_b", "time", "{}")]


def calling(*before: ScriptEntry, reason: FinishReason = "tool_calls") -> FakeGenerator:
    return FakeGenerator(script=[*before, *CALLS, finished(reason)])


async def tools_of(**fields: Any) -> ToolUse | None:
    return (await request_for(**fields)).tools


async def answer_of(generator: FakeGenerator, **fields: Any) -> dict[str, Any]:
    response = await post(app_of(generator), chat(**fields))
    assert response.status_code == 200, response.text
    check_completion(response.json())
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def stream_of(generator: FakeGenerator, **fields: Any) -> StreamedAnswer:
    response = await post(app_of(generator), chat(**fields, stream=True))
    assert response.status_code == 200, response.text
    return read_stream(response.text)


def calls_of(tool_calls: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in tool_calls]


def deltas_of(answer: StreamedAnswer) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in answer.chunks]


# -- requests


async def test_definitions_reach_the_model_as_they_were_given() -> None:
    use = await tools_of(tools=TOOLS)
    assert use is not None
    weather, time = use.tools
    assert json.loads(weather.definition)["function"] == {
        "name": "weather",
        "description": "Wie ist das Wetter? ☀",
        "parameters": PARAMETERS,
    }
    assert "☀" in weather.definition  # as chat templates write it
    assert (json.loads(weather.parameters), weather.strict) == (PARAMETERS, True)
    assert time == FunctionTool(
        "time", '{"type": "function", "function": {"name": "time"}}', '{"type": "object", "properties": {}}'
    )


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({}, {"type": "object"}),
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "type": "object"}),
        (
            {"anyOf": [{"required": ["a"]}, {"type": "object"}]},
            {"anyOf": [{"required": ["a"], "type": "object"}, {"type": "object"}], "type": "object"},
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}},
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}, "type": "object"},
        ),
        ({"enum": [{"a": 1}]}, {"enum": [{"a": 1}], "type": "object"}),
    ],
)
async def test_arguments_are_an_object_also_where_the_schema_does_not_say_so(
    given: Any, arguments: Any
) -> None:
    use = await tools_of(tools=[tool(parameters=given)])
    assert use is not None
    assert json.loads(use.tools[0].parameters) == arguments
    assert json.loads(use.tools[0].definition)["function"]["parameters"] == given


@pytest.mark.parametrize(
    ("fields", "names", "is_required", "is_parallel"),
    [
        ({}, {"weather", "time"}, False, True),
        ({"tool_choice": "auto"}, {"weather", "time"}, False, True),
        ({"tool_choice": None, "parallel_tool_calls": False}, {"weather", "time"}, False, False),
        ({"tool_choice": "required"}, {"weather", "time"}, True, True),
        ({"tool_choice": named("time")}, {"time"}, True, False),
        ({"tool_choice": allowed("auto", "time")}, {"time"}, False, True),
        ({"tool_choice": allowed("required", "time")}, {"time"}, True, True),
    ],
)
async def test_choice_says_what_may_and_what_must_be_called(
    fields: dict[str, Any], names: set[str], is_required: bool, is_parallel: bool
) -> None:
    use = await tools_of(tools=TOOLS, **fields)
    assert use is not None
    assert len(use.tools) == 2
    assert (use.callable_names, use.is_required, use.is_parallel) == (names, is_required, is_parallel)


async def test_choice_of_none_takes_the_tools_away() -> None:
    assert await tools_of(tools=TOOLS, tool_choice="none") is None


async def test_calls_and_results_of_earlier_turns_reach_the_model_in_order() -> None:
    generator = FakeGenerator()
    body = chat("What is the weather?")
    calls = [
        {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": PARIS}},
        {"id": "call_b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_b", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_a", "content": "sunny"},
        {"role": "user", "content": "And?"},
    ]
    assert (await post(app_of(generator), body)).status_code == 200
    _, assistant, *results, user = generator.last_request.messages
    assert assistant.tool_calls == (ToolCall("weather", PARIS), ToolCall("time", "{}"))
    assert assistant.content == (TextPart(""),)
    assert [message.content for message in results] == [(TextPart(text),) for text in ("sunny", "noon")]
    assert user.content == (TextPart("And?"),)


async def test_a_result_may_answer_a_call_without_an_id() -> None:
    generator = FakeGenerator()
    body = chat("Go.")
    body["messages"] += [
        {"role": "assistant", "tool_calls": [{"function": {"name": "time"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
    ]
    assert (await post(app_of(generator), body)).status_code == 200
    assert generator.last_request.messages[-1].content == (TextPart("noon"),)


async def test_results_of_a_call_whose_id_is_there_twice_belong_to_the_first() -> None:
    generator = FakeGenerator()
    body = chat("Go.")
    calls = [{"id": call_id, "function": {"name": "time"}} for call_id in ("a", "b", "a")]
    body["messages"] += [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    assert (await post(app_of(generator), body)).status_code == 200
    _, _, *results = generator.last_request.messages
    assert [message.content for message in results] == [(TextPart("1"),), (TextPart("2"),)]


@pytest.mark.parametrize("num_calls", [0, 1200])
async def test_more_messages_and_calls_than_tokens_fit_are_refused_unread(num_calls: int) -> None:
    generator = FakeGenerator()
    body = chat("Go.")
    body["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}] * num_calls}
    ]
    result = (
        {"role": "tool", "tool_call_id": "a", "content": "x"}
        if num_calls
        else {"role": "user", "content": "x"}
    )
    body["messages"] += [result] * (MODEL.max_model_len - num_calls - 2)
    assert (await post(app_of(generator), body)).status_code == 200
    body["messages"].append({"role": "tool", "content": "x"})  # without the id of its call
    error = error_of(await post(app_of(generator), body))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


class CountedId(str):
    """Counts comparisons with others."""

    __slots__ = ()
    num_compared = 0

    def __eq__(self, other: object) -> bool:
        CountedId.num_compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


async def test_work_on_results_grows_no_faster_than_their_number() -> None:
    number = 500
    function = CalledFunction(name="time")
    ids = [str(index) for index in range(number)]
    calls = [PastToolCall.model_construct(id=CountedId(i), function=function) for i in ids]
    messages = [Message.model_construct(role="assistant", tool_calls=calls)]
    messages += [
        Message.model_construct(role="tool", tool_call_id=CountedId(i), content="x") for i in reversed(ids)
    ]
    loaded = await load_messages(messages, MODEL, MediaLoader(ApiConfig()), lambda _: None)
    assert len(loaded) == number + 1
    assert CountedId.num_compared <= 4 * number


# -- whole answers


async def test_answer_that_is_a_call_has_no_content() -> None:
    choice = await answer_of(calling(), tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert calls_of(choice["message"]["tool_calls"]) == EXPECTED_CALLS


async def test_text_before_a_call_is_content() -> None:
    choice = await answer_of(calling(TextDelta("Let me see.", (1,))), tools=TOOLS)
    assert choice["message"]["content"] == "Let me see."
    assert len(choice["message"]["tool_calls"]) == 2


async def test_answer_without_calls_has_no_such_key() -> None:
    choice = await answer_of(FakeGenerator(), tools=TOOLS)
    assert "tool_calls" not in choice["message"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (TEXT, "stop")


async def test_call_in_an_answer_by_voice_has_no_audio() -> None:
    for choice in ("auto", "required"):
        got = await answer_of(calling(), **SPEECH, tools=TOOLS, tool_choice=choice)
        assert got["message"]["audio"] is None
        assert got["message"]["content"] is None
        assert calls_of(got["message"]["tool_calls"]) == EXPECTED_CALLS


async def test_what_is_said_before_a_call_has_audio() -> None:
    spoken = [TextDelta("Let me see.", (1,)), AudioDelta(0, SAMPLES)]
    got = await answer_of(calling(*spoken), **SPEECH, tools=TOOLS)
    assert got["message"]["audio"]["transcript"] == "Let me see."
    assert got["message"]["content"] is None
    assert len(got["message"]["tool_calls"]) == 2


# -- streams


async def test_official_clients_message_can_be_sent_back() -> None:
    generator = calling(TextDelta("Let me see.", (1,)), AudioDelta(0, SAMPLES))
    async with openai_client(app_of(generator)) as client:
        arguments: Any = chat(**SPEECH, tools=TOOLS)
        message = (await client.chat.completions.create(**arguments)).choices[0].message
        arguments["messages"].append(message)
        arguments["messages"].append({"role": "tool", "tool_call_id": "call_a", "content": "sunny"})
        await client.chat.completions.create(**arguments)
    _, assistant, result = generator.last_request.messages
    assert assistant.content == (TextPart("Let me see."),)
    assert assistant.tool_calls == (ToolCall("weather", PARIS), ToolCall("time", "{}"))
    assert (result.role, result.content) == ("tool", (TextPart("sunny"),))


async def test_streamed_call_has_id_and_name_once() -> None:
    answer = await stream_of(calling(), tools=TOOLS)
    pieces = [piece for delta in deltas_of(answer) for piece in delta.get("tool_calls", [])]
    assert pieces[0] == {
        "index": 0,
        "id": "call_a",
        "type": "function",
        "function": {"name": "weather", "arguments": ""},
    }
    assert pieces[1] == {"index": 0, "function": {"arguments": '{"city": '}}
    assert [piece["index"] for piece in pieces] == [0, 0, 0, 1, 1]
    assert (answer.finish_reason, answer.text) == ("tool_calls", "")


async def test_streamed_audio_of_a_turn_with_tools_begins_with_the_first_word() -> None:
    generator = FakeGenerator()
    answer = await stream_of(generator, **PCM16, tools=TOOLS)
    first, second, *_ = deltas_of(answer)
    assert first == {"role": "assistant", "content": None, "refusal": None}
    assert second["audio"] == {"id": answer.audio_id, "transcript": "Hello"}
    assert answer.transcript == TEXT
    assert len(answer.data) == 2 * len(SAMPLES)


async def test_streamed_words_before_a_call_are_heard_and_can_be_referred_to() -> None:
    generator = calling(TextDelta("Let me see.", (1,)), AudioDelta(0, SAMPLES))
    app = app_of(generator)
    answer = read_stream((await post(app, chat(**PCM16, tools=TOOLS, stream=True))).text)
    assert (answer.transcript, answer.finish_reason) == ("Let me see.", "tool_calls")
    assert len(answer.data) == 2 * len(SAMPLES)
    body = chat()
    body["messages"].append({"role": "assistant", "audio": {"id": answer.audio_id}})
    assert (await post(app, body)).status_code == 200
    assert generator.last_request.messages[1].content == (TextPart("Let me see."),)


async def test_token_whose_text_is_held_back_says_nothing_of_audio_before_its_id() -> None:
    held = SampledToken(TokenLogprob("<", b"<", -0.5), ())
    said = SampledToken(TokenLogprob("b>", b"b>", -0.5), ())
    script: list[ScriptEntry] = [TextDelta("", (1,), (held,)), TextDelta("<b>", (2,), (said,)), finished()]
    answer = await stream_of(FakeGenerator(script=script), **PCM16, tools=TOOLS, logprobs=True)
    _, first, second, *_ = deltas_of(answer)
    assert first == {}
    assert [token["token"] for token in answer.chunks[1]["choices"][0]["logprobs"]["content"]] == ["<"]
    assert second["audio"] == {"id": answer.audio_id, "transcript": "<b>"}


async def test_streamed_silence_of_a_turn_with_tools_is_an_answer_by_voice() -> None:
    answer = await stream_of(FakeGenerator(script=[finished()]), **PCM16, tools=TOOLS)
    assert answer.audio_id is not None
    assert answer.finish_reason == "stop"


async def test_official_accumulator_rebuilds_calls() -> None:
    async with (
        openai_client(app_of(calling(TextDelta("Hm.", (1,))))) as client,
        client.chat.completions.stream(**chat(), tools=[TIME, tool(name="weather")]) as events,
    ):
        choice = (await events.get_final_completion()).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Hm."
    assert choice.message.tool_calls is not None
    assert calls_of([call.model_dump() for call in choice.message.tool_calls]) == EXPECTED_CALLS


async def test_streamed_call_in_an_answer_by_voice_has_no_audio() -> None:
    answer = await stream_of(calling(), **PCM16, tools=TOOLS)
    assert answer.audio_id is None
    assert not [delta for delta in deltas_of(answer) if "audio" in delta]
    assert answer.finish_reason == "tool_calls"
