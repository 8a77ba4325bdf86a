"""Functions that the model may call."""

import json
from typing import Any

import pytest

from omni_server.types import AudioDelta, ChatMessage, TextDelta, TextPart, ToolCall, ToolCallDelta
from tests.unit.api.fake_generator import FakeGenerator, Hang, ScriptEntry, finished
from tests.unit.api.realtime.realtime_client import RealtimeClient, voice

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
TIME = {"type": "function", "name": "time"}
CALL: list[ScriptEntry] = [
    TextDelta("", (1,)),
    ToolCallDelta(0, "call_1", "weather", '{"pl'),
    ToolCallDelta(0, None, None, 'ace": "Oslo"}'),
]
END: list[ScriptEntry] = [finished("tool_calls")]
CALL_DONE = ["response.function_call_arguments.done", "response.output_item.done", "conversation.item.done"]


async def test_a_call_is_made_answered_and_spoken_about() -> None:
    generator = FakeGenerator(script=[*CALL, *END])
    async with RealtimeClient(generator) as client:
        await client.opened(tools=[WEATHER, TIME])
        assert client.events[-1]["session"]["tools"][0] == WEATHER
        await client.say("What is the weather in Oslo?")
        first = len(client.events)
        done = await client.answer()
        assert [event["type"] for event in client.events[first:]] == [
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.delta",
            *CALL_DONE,
            "response.done",
        ]
        call = client.of_type("response.function_call_arguments.done")[0]
        assert (call["call_id"], call["name"]) == ("call_1", "weather")
        assert json.loads(call["arguments"]) == {"place": "Oslo"}
        deltas = client.of_type("response.function_call_arguments.delta")
        assert "".join(delta["delta"] for delta in deltas) == call["arguments"]
        assert done["status"] == "completed"
        assert [item["type"] for item in done["output"]] == ["function_call"]
        assert done["output"][0]["id"] == call["item_id"]

        generator.script = None
        result = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
        await client.send("conversation.item.create", item=result)
        assert (await client.next())["item"]["output"] == "sunny"
        done = await client.answer()
        assert done["output"][0]["content"][0]["type"] == "output_audio"
        request = generator.last_request
        assert request.messages[1:] == (
            ChatMessage("assistant", (), (ToolCall("weather", '{"place": "Oslo"}'),)),
            ChatMessage("tool", (TextPart("sunny"),)),
        )
        assert request.tools is not None
        assert [tool.name for tool in request.tools.tools] == ["weather", "time"]
        shown = {name: WEATHER[name] for name in ("name", "description", "parameters")}
        assert json.loads(request.tools.tools[0].definition) == {"type": "function", "function": shown}


async def test_calls_follow_the_audio_of_what_is_said_before_them() -> None:
    script: list[ScriptEntry] = [
        TextDelta("Let me see.", (1,)),
        *CALL,
        ToolCallDelta(1, "call_2", "time", "{}"),
        AudioDelta(0, voice(0.1)),
        AudioDelta(2400, voice(0.1)),
        finished("tool_calls", codec_tokens=10),
    ]
    async with RealtimeClient(FakeGenerator(script=script)) as client:
        await client.opened(tools=[WEATHER, TIME])
        done = await client.answer()
        types = client.types()
        last_audio = len(types) - 1 - types[::-1].index("response.output_audio.delta")
        assert last_audio < types.index("response.function_call_arguments.delta")
        assert types.index("response.output_audio.done") < types.index(
            "response.function_call_arguments.delta"
        )
        assert types[-5:] == ["response.function_call_arguments.delta", *CALL_DONE, "response.done"]
        added = client.of_type("response.output_item.added")
        assert [(event["output_index"], event["item"]["type"]) for event in added] == [
            (0, "message"),
            (1, "function_call"),
            (2, "function_call"),
        ]
        assert [item["id"] for item in done["output"]] == [event["item"]["id"] for event in added]
        assert all(item["status"] == "completed" for item in done["output"])


async def test_an_answer_of_nothing_is_an_empty_message() -> None:
    async with RealtimeClient(FakeGenerator(script=[finished()])) as client:
        await client.opened(tools=[WEATHER])
        done = await client.answer()
        assert done["output"][0]["content"][0]["transcript"] == ""


async def test_a_call_that_was_interrupted_is_not_run_and_not_remembered() -> None:
    generator = FakeGenerator(script=[*CALL, Hang()])
    async with RealtimeClient(generator) as client:
        await client.opened(tools=[WEATHER])
        await client.say("hi")
        await client.send("response.create")
        await client.until("response.function_call_arguments.delta")
        await client.until("response.function_call_arguments.delta")
        await client.send("response.cancel")
        done = (await client.until("response.done"))["response"]
        assert done["output"][0]["status"] == "incomplete"
        assert not client.of_type("response.function_call_arguments.done")
        generator.script = None
        await client.answer()
        assert [message.role for message in generator.last_request.messages] == ["user"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ({"weather", "time"}, False)),
        ("required", ({"weather", "time"}, True)),
        ({"type": "function", "name": "time"}, ({"time"}, True)),
        ("none", None),
    ],
)
async def test_the_choice_says_what_may_be_called(
    choice: Any, expected: tuple[set[str], bool] | None
) -> None:
    async with RealtimeClient() as client:
        await client.opened(tools=[WEATHER, TIME])
        await client.answer({"tool_choice": choice})
        use = client.generator.last_request.tools
        assert (None if use is None else (use.callable_names, use.is_required)) == expected


@pytest.mark.parametrize("is_parallel", [True, False])
async def test_a_session_may_ask_for_one_call_at_a_time(*, is_parallel: bool) -> None:
    async with RealtimeClient() as client:
        await client.opened(tools=[WEATHER, TIME], parallel_tool_calls=is_parallel)
        assert client.events[-1]["session"]["parallel_tool_calls"] == is_parallel
        await client.answer()
        use = client.generator.last_request.tools
        assert use is not None
        assert use.is_parallel == is_parallel
        await client.answer({"parallel_tool_calls": not is_parallel})
        use = client.generator.last_request.tools
        assert use is not None
        assert use.is_parallel != is_parallel


async def test_the_output_of_an_unknown_call_is_refused() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        await client.say("Hello")
        result = {"type": "function_call_output", "call_id": "call_x", "output": "noon"}
        error = await client.refused("conversation.item.create", item=result)
        assert (error["param"], error["code"]) == ("item.call_id", "invalid_tool_call_id")
        assert error["message"] == "Tool call ID 'call_x' not found in conversation."
        call = {"type": "function_call", "call_id": "call_x", "name": "time", "arguments": "{}"}
        error = await client.refused("response.create", response={"input": [result, call]})
        assert (error["param"], error["code"]) == ("response.input[0].call_id", "invalid_tool_call_id")
        await client.send("conversation.item.create", item=call | {"call_id": None})
        call_id = (await client.until("conversation.item.done"))["item"]["call_id"]
        own = [call | {"call_id": call_id}, result | {"call_id": call_id}]
        await client.answer({"input": own})
        assert [message.role for message in client.generator.last_request.messages] == ["assistant", "tool"]


async def test_tools_of_one_response_are_looked_at_as_well() -> None:
    async with RealtimeClient() as client:
        await client.opened(tools=[WEATHER])
        tools = [TIME | {"parameters": {"anyOf": [{"type": "object"}, {"type": "array"}]}}]
        error = await client.refused("response.create", response={"tools": tools})
        assert (error["param"], error["code"]) == (
            "response.tools[0].parameters",
            "invalid_function_parameters",
        )
        tools = [TIME | {"description": "x" * 2**18}]
        error = await client.refused("response.create", response={"tools": tools})
        assert (error["param"], error["code"]) == ("response.tools", "value_above_max_size")
