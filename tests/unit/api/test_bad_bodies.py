"""Bodies that are no request at all, or were one before a field was lost: a 400, never a failure
of the server."""

import json
import random
from typing import Any

import pytest

from tests.unit.api.clients import (
    ENDPOINTS,
    SPEECH,
    URL,
    Endpoint,
    app_of,
    base64_of,
    chat,
    each_endpoint,
    error_of,
    http_client,
    tone,
)
from tests.unit.api.fake_generator import FakeGenerator
from tests.unit.api.test_bad_requests import allowed, tool

NOT_JSON = [
    ("cut short", b"{"),
    ("empty", b""),
    ("NaN", b'{"model":"omni","temperature":NaN}'),
    ("Infinity", b'{"model":"omni","temperature":-Infinity}'),
    ("lone surrogate", b'{"model":"omni","messages":[{"role":"user","content":"\\ud800"}]}'),
    ("reversed surrogates", b'{"model":"\\udc00\\ud800"}'),
    ("not UTF-8", b'{"model":"\xff"}'),
    ("UTF-16", '{"model":"omni"}'.encode("utf-16")),
    ("deep arrays", b"[" * 100_000),
    ("deep objects", b'{"messages":' * 10_000 + b"1" + b"}" * 10_000),
    ("huge integer", b'{"max_tokens":' + b"1" * 10_000 + b"}"),
    ("form", b"model=omni"),
    ("trailing words", b"{} x"),
]


ROUTES = [*(endpoint.url for endpoint in ENDPOINTS), "/tokenize", "/detokenize"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("body", [row[1] for row in NOT_JSON], ids=[row[0] for row in NOT_JSON])
async def test_body_that_is_not_json_is_refused(body: bytes, path: str) -> None:
    async with http_client(app_of(FakeGenerator())) as client:
        response = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert error_of(response)["code"] == "invalid_json"


async def test_number_beyond_a_double_is_out_of_bounds() -> None:
    body = b'{"model":"omni","messages":[{"role":"user","content":"hi"}],"temperature":1e999}'
    async with http_client(app_of(FakeGenerator())) as client:
        response = await client.post(URL, content=body, headers={"content-type": "application/json"})
    assert error_of(response)["param"] == "temperature"


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"]
)
@each_endpoint
async def test_other_content_types_are_refused(endpoint: Endpoint, content_type: str) -> None:
    async with http_client(app_of(FakeGenerator())) as client:
        response = await client.post(
            endpoint.url, content=json.dumps(endpoint.body()), headers={"content-type": content_type}
        )
    assert error_of(response)["code"] == "invalid_content_type"


@pytest.mark.parametrize("path", ROUTES)
async def test_no_mutilated_body_is_a_failure_of_the_server(path: str) -> None:
    """Values of a body with every field are replaced, removed and duplicated at random, by a fixed seed."""
    rng = random.Random(0)
    statuses = set()
    async with http_client(app_of(FakeGenerator())) as client:
        for _ in range(400):
            body = _mutilated(rng, OTHER_BODIES.get(path, FULL_BODY))
            response = await client.post(path, json=body if body is not None else "null")
            statuses.add(response.status_code)
            if response.status_code != 200:
                error_of(response, response.status_code)
    assert statuses == {200, 400, 404}


FULL_BODY = chat(
    [
        {"type": "text", "text": "a"},
        {"type": "input_audio", "input_audio": {"data": base64_of(tone()), "format": "wav"}},
    ],
    **SPEECH,
    stream=True,
    stream_options={"include_usage": True},
    max_tokens=5,
    temperature=0.5,
    seed=1,
    stop=["a"],
    stage_sampling={"talker": {"top_k": 3, "seed": 2}},
    logprobs=True,
    top_logprobs=2,
    logit_bias={"5": 1},
    response_format={"type": "text"},
    tools=[tool(), tool(name="g")],
    tool_choice=allowed("auto", "f"),
    metadata={"a": "b"},
)
OTHER_BODIES: dict[str, Any] = {
    "/v1/responses": {
        "model": "omni",
        "input": [
            FULL_BODY["messages"][0],
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "b"}]},
        ],
        **SPEECH,
        "instructions": "Be brief.",
        "stream": True,
        "store": True,
        "max_output_tokens": 5,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
        "text": {"format": {"type": "text"}},
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "tool_choice": {"type": "function", "name": "f"},
        "metadata": {"a": "b"},
    },
    "/v1/completions": {
        "model": "omni",
        "prompt": [[1, 2], [3]],
        "n": 2,
        "logprobs": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "suffix": "",
        "echo": False,
    },
    "/tokenize": {"model": "omni", "prompt": "a", "return_token_strs": True, "add_special_tokens": False},
    "/detokenize": {"model": "omni", "tokens": [1, 2]},
}
ODD_VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    "",
    "text",
    "audio",
    "data:",
    [],
    {},
    [[]],
    [None],
    {"type": "text"},
]


def _mutilated(rng: random.Random, value: Any) -> Any:
    """A copy in which one place is changed."""
    if rng.random() < 0.25 or not isinstance(value, dict | list) or not value:
        return rng.choice(ODD_VALUES)
    if isinstance(value, list):
        index = rng.randrange(len(value))
        return [*value[:index], _mutilated(rng, value[index]), *value[index:]]
    key = rng.choice(list(value))
    copy = {name: item for name, item in value.items() if name != key}
    return copy if rng.random() < 0.1 else copy | {key: _mutilated(rng, value[key])}
