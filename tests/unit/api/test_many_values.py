"""Bodies with very many values, most of them wrong: refused for the first, at the cost of a few.

Found by enlarging the lists and objects of valid bodies: a body of 2 MB made the server note a million
faults, in 1.2 GB of memory and 3 s of the event loop; one of 128 MB would have ended it.
"""

import json
import tracemalloc
from typing import Any

import pytest

from omni_server.api.schemas import ChatCompletionRequest
from omni_server.api.validation import MAX_JSON_MARKS, validate
from omni_server.errors import InvalidRequestError
from tests.unit.api.clients import URL, app_of, chat, error_of, http_client
from tests.unit.api.fake_generator import FakeGenerator
from tests.unit.api.realtime.realtime_client import RealtimeClient

MANY = 50_000
NAMED = {str(number): "x" for number in range(MANY)}
MAX_BYTES = 8_000_000
"""A copy of an object with so many keys takes 3 MB; their faults took 25 MB."""


def of_user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "omni", "messages": [{"role": "user", "content": content, **fields}]}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (chat(modalities=[1] * MANY), "modalities[0]", "invalid_type"),
        ({"model": "omni", "messages": [0] * MANY}, "messages[0]", "invalid_type"),
        (of_user([0] * MANY), "messages[0].content[0]", "invalid_type"),
        (of_user("hi", tool_calls=[0] * MANY), "messages[0].tool_calls[0]", "invalid_type"),
        (chat(bad_words=[1] * MANY), "bad_words[0]", "invalid_type"),
        (chat(bad_words=["a"] * MANY), "bad_words", "array_above_max_length"),
        (chat(stop=[1] * MANY), "stop", "array_above_max_length"),
        (chat(tools=[1] * MANY), "tools", "array_above_max_length"),
        (chat(structured_outputs={"choice": [0] * MANY}), "structured_outputs.choice[0]", "invalid_type"),
        (
            chat(
                tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [0] * MANY}}
            ),
            "tool_choice.allowed_tools.tools[0]",
            "invalid_type",
        ),
        (chat(logit_bias=NAMED), "logit_bias", "object_above_max_properties"),
        (chat(metadata=dict.fromkeys(NAMED, 1)), "metadata", "object_above_max_properties"),
        (chat(audio=NAMED), "audio.0", "unknown_parameter"),
        (chat(stage_sampling={"talker": NAMED}), "stage_sampling.talker.0", "unknown_parameter"),
        (chat(structured_outputs=NAMED), "structured_outputs.0", "unknown_parameter"),
    ],
)
def test_the_first_of_many_faults_is_told_and_the_others_are_not_noted(
    body: dict[str, Any], param: str, code: str
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError) as caught:
            validate(ChatCompletionRequest, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (caught.value.param, caught.value.code) == (param, code)
    assert peak < MAX_BYTES


@pytest.mark.parametrize("value", [b"[]", b"{}", b"0", b'"a,a"'])
async def test_more_values_than_anybody_needs_are_not_parsed(value: bytes) -> None:
    body = b'{"model":"omni","messages":[' + b",".join([value] * (MAX_JSON_MARKS + 1)) + b"]}"
    app = app_of(FakeGenerator())
    async with http_client(app) as client:
        response = await client.post(URL, content=body, headers={"content-type": "application/json"})
        assert error_of(response, 413)["code"] == "too_many_values"
        assert (await client.post(URL, json=chat())).status_code == 200


async def test_an_event_with_more_values_than_anybody_needs_is_not_parsed() -> None:
    async with RealtimeClient() as client:
        await client.opened()
        await client.send_raw(json.dumps({"type": "response.create", "metadata": [0] * (MAX_JSON_MARKS + 1)}))
        event = await client.next()
        assert event["error"]["code"] == "invalid_event"
        assert "values" in event["error"]["message"]
        await client.nothing_comes()


async def test_a_word_that_would_take_seconds_to_tokenise_is_refused() -> None:
    """One of 5 MB kept the event loop for 17 s."""
    async with http_client(app_of(FakeGenerator())) as client:
        assert (await client.post(URL, json=chat(bad_words=["a" * 1024]))).status_code == 200
        error = error_of(await client.post(URL, json=chat(bad_words=["ok", "a" * 1025])))
    assert (error["param"], error["code"]) == ("bad_words[1]", "string_above_max_length")
