"""`POST /v1/completions`, `/tokenize` and `/detokenize`."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from openai.types import Completion

from omni_server.api.config import ApiConfig
from omni_server.errors import InvalidRequestError, StageError
from omni_server.types import FunctionTool, Prompt, TextDelta, TokenLogprob
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import app_of, chat, error_of, http_client, openai_client
from tests.unit.api.fake_generator import (
    IMAGE_MODEL,
    PROMPT,
    READING_MODEL,
    TEXT,
    FakeGenerator,
    Hang,
    ScriptEntry,
    finished,
)
from tests.unit.api.sse_validator import parse_frames
from tests.unit.api.test_bad_requests import tool
from tests.unit.api.test_choices import SCRIPT, EachItsOwn, saying

COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/completions", "/tokenize", "/detokenize"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "omni", "prompt": "a"},
    TOKENIZE: {"prompt": "a"},
    DETOKENIZE: {"tokens": [97]},
}
each_route = pytest.mark.parametrize("path", BODIES)


async def post(generator: FakeGenerator, path: str, body: Any, **config: Any) -> httpx2.Response:
    async with http_client(app_of(generator, ApiConfig(**config))) as client:
        return await client.post(path, json=body)


def completion(**fields: Any) -> dict[str, Any]:
    return BODIES[COMPLETIONS] | fields


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Once", [Prompt("Once", add_special_tokens=False)]),
        (["a", "b"], [Prompt("a", add_special_tokens=False), Prompt("b", add_special_tokens=False)]),
        ([5, 0], [Prompt(token_ids=(5, 0))]),
        ([[5, 0], [7]], [Prompt(token_ids=(5, 0)), Prompt(token_ids=(7,))]),
    ],
)
async def test_every_prompt_has_all_its_choices_in_a_row(prompt: Any, prompts: list[Prompt]) -> None:
    words = [saying(f"{index}") for index in range(2 * len(prompts))]
    generator = EachItsOwn(*words)
    body = completion(prompt=prompt, n=2, seed=3, add_special_tokens=False)
    answer = (await post(generator, COMPLETIONS, body)).json()
    Completion.model_validate(answer)
    assert answer["object"] == "text_completion"
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (index, str(index)) for index in range(len(words))
    ]
    assert [request.prompt for request in generator.requests] == [
        prompt for prompt in prompts for _ in range(2)
    ]
    assert [request.sampling["thinker"].seed for request in generator.requests] == [3, 4] * len(prompts)
    assert all(request.messages == () for request in generator.requests)
    assert answer["usage"]["prompt_tokens"] == len(prompts) * PROMPT.total
    assert answer["usage"]["completion_tokens"] == 6 * len(words)
    assert all(generation.num_closed == 1 for generation in generator.generations)


@pytest.mark.parametrize(
    ("fields", "max_tokens"), [({}, 16), ({"max_tokens": None}, None), ({"max_tokens": 7}, 7)]
)
async def test_text_has_sixteen_tokens_unless_the_request_says_otherwise(
    fields: dict[str, Any], max_tokens: int | None
) -> None:
    generator = FakeGenerator()
    body = completion(**fields, stop="x", top_k=4, logit_bias={"5": 1}, structured_outputs={"regex": "a+"})
    assert (await post(generator, COMPLETIONS, body)).status_code == 200
    sampling = generator.last_request.sampling["thinker"]
    assert (sampling.max_tokens, sampling.stop, sampling.top_k, sampling.logit_bias) == (
        max_tokens,
        ("x",),
        4,
        {5: 1.0},
    )
    assert generator.last_request.structured_output is not None


@pytest.mark.parametrize("include_usage", [False, True])
async def test_stream_joins_to_the_text_and_ends_with_usage_and_done(*, include_usage: bool) -> None:
    body = completion(prompt=["a", "b"], stream=True, stream_options={"include_usage": include_usage})
    *payloads, done = parse_frames((await post(FakeGenerator(), COMPLETIONS, body)).text)
    chunks = [json.loads(payload) for payload in payloads]
    assert done == "[DONE]"
    if include_usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], 2 * PROMPT.total)
    assert all(("usage" in chunk) == include_usage and chunk.get("usage") is None for chunk in chunks)
    for index in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == TEXT
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]


async def test_official_client_reads_whole_answers_and_streams() -> None:
    async with openai_client(app_of(FakeGenerator())) as client:
        whole = await client.completions.create(model="omni", prompt="a")
        stream = await client.completions.create(model="omni", prompt="a", stream=True)
        streamed = [chunk.choices[0].text async for chunk in stream]
    assert whole.choices[0].text == "".join(streamed) == TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_have_the_shape_of_completions(*, stream: bool) -> None:
    own = SCRIPT[0].logprobs[0] if isinstance(SCRIPT[0], TextDelta) else None
    assert own is not None
    rare = replace(own, sampled=TokenLogprob("rare", b"rare", -7.0))
    script = [TextDelta("rare", (9,), (rare,)), *SCRIPT]
    response = await post(FakeGenerator(script=script), COMPLETIONS, completion(logprobs=2, stream=stream))
    if stream:
        bodies = [json.loads(payload) for payload in parse_frames(response.text)[:-1]]
    else:
        bodies = [response.json()]
    entries = [body["choices"][0]["logprobs"] for body in bodies]
    joined = {name: [item for entry in entries for item in entry[name]] for name in entries[0]}
    assert joined == {
        "tokens": ["rare", "Hi ", "\ufffd", "\ufffd", "<|x|>"],
        "token_logprobs": [-7.0, -0.5, -0.5, -0.5, -0.5],
        "text_offset": [0, 4, 7, 7, 8],
        "top_logprobs": [
            {"Hi ": -0.5, "other": -9999.0, "rare": -7.0},
            {"Hi ": -0.5, "other": -9999.0},
            {"\ufffd": -0.5, "other": -9999.0},
            {"\ufffd": -0.5, "other": -9999.0},
            {"<|x|>": -0.5, "other": -9999.0},
        ],
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failing_choice_fails_the_answer_and_ends_the_others(*, stream: bool) -> None:
    failing: list[ScriptEntry] = [TextDelta("a", (1,)), StageError("thinker", "broken")]
    generator = EachItsOwn([Hang()], failing)
    body = completion(prompt=["a", "b"], stream=stream)
    response = await asyncio.wait_for(post(generator, COMPLETIONS, body), 10)
    if stream:
        assert "broken" in parse_frames(response.text)[-1]
    else:
        error_of(response, 500)
    assert [generation.num_closed for generation in generator.generations] == [1, 1]


async def test_leaving_ends_all_choices_and_silence_is_filled_with_comments() -> None:
    generator = FakeGenerator(script=[Hang()])
    app = app_of(generator, ApiConfig(sse_keep_alive_s=0.01))
    async with AsgiCall(app, completion(n=2, stream=True), path=COMPLETIONS) as call:
        await call.body_until(b": keep-alive\n\n")
        call.leave()
        for generation in generator.generations:
            await asyncio.wait_for(generation.closed.wait(), 10)
    assert len(generator.generations) == 2


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"model": "omni"}, "prompt", "missing_required_parameter"),
    (COMPLETIONS, completion(prompt=None), "prompt", "invalid_type"),
    (COMPLETIONS, completion(prompt={}), "prompt", "invalid_type"),
    (COMPLETIONS, completion(prompt=""), "prompt", "empty_string"),
    (COMPLETIONS, completion(prompt=[]), "prompt", "empty_array"),
    (COMPLETIONS, completion(prompt=["a", ""]), "prompt[1]", "empty_string"),
    (COMPLETIONS, completion(prompt=["a", 1]), "prompt[1]", "invalid_type"),
    (COMPLETIONS, completion(prompt=[1, "a"]), "prompt[1]", "invalid_type"),
    (COMPLETIONS, completion(prompt=[True]), "prompt[0]", "invalid_type"),
    (COMPLETIONS, completion(prompt=[1, -1]), "prompt[1]", "integer_below_min_value"),
    (COMPLETIONS, completion(prompt=[[1], []]), "prompt[1]", "empty_array"),
    (COMPLETIONS, completion(prompt=["a"] * 1025), "prompt", "array_above_max_length"),
    (COMPLETIONS, completion(prompt=["a"] * 5), "prompt", "integer_above_max_value"),
    (COMPLETIONS, completion(prompt=["a"] * 3, n=2), "n", "integer_above_max_value"),
    (COMPLETIONS, completion(logprobs=21), "logprobs", "integer_above_max_value"),
    (COMPLETIONS, completion(logprobs=True), "logprobs", "invalid_type"),
    (COMPLETIONS, completion(max_tokens=0), "max_tokens", "integer_below_min_value"),
    (COMPLETIONS, completion(min_tokens=17), "min_tokens", "invalid_value"),
    (COMPLETIONS, completion(echo=True), "echo", "unsupported_value"),
    (COMPLETIONS, completion(suffix="b"), "suffix", "unsupported_value"),
    (COMPLETIONS, completion(best_of=2), "best_of", "unsupported_value"),
    (COMPLETIONS, completion(prompt_logprobs=1), "prompt_logprobs", "unsupported_value"),
    (COMPLETIONS, completion(stream_options={}), "stream_options", "invalid_value"),
    (
        COMPLETIONS,
        completion(ignore_eos=True, structured_outputs={"regex": "a"}),
        "ignore_eos",
        "invalid_value",
    ),
    (TOKENIZE, {}, "prompt", "missing_required_parameter"),
    (TOKENIZE, {"prompt": ["a"]}, "prompt", "invalid_type"),
    (TOKENIZE, {"messages": []}, "messages", "empty_array"),
    (TOKENIZE, chat(add_generation_prompt=False), "add_generation_prompt", "unsupported_value"),
    (DETOKENIZE, {}, "tokens", "missing_required_parameter"),
    (DETOKENIZE, {"tokens": "a"}, "tokens", "invalid_type"),
    (DETOKENIZE, {"tokens": [1, 2.5]}, "tokens[1]", "invalid_type"),
    (DETOKENIZE, {"tokens": [2**31]}, "tokens[0]", "integer_above_max_value"),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), REFUSED)
async def test_bad_field_is_refused_with_its_name(
    path: str, body: dict[str, Any], param: str, code: str
) -> None:
    generator = FakeGenerator()
    error = error_of(await post(generator, path, body, max_queue=4))
    assert (error["param"], error["code"]) == (param, code)
    assert generator.requests == []


@pytest.mark.parametrize("field", ["echo", "suffix", "best_of"])
async def test_values_without_effect_are_accepted(field: str) -> None:
    harmless = {"echo": False, "suffix": "", "best_of": 1}[field]
    for value in (None, harmless):
        response = await post(FakeGenerator(), COMPLETIONS, completion(**{field: value}))
        assert response.status_code == 200


@each_route
@pytest.mark.parametrize("model", [IMAGE_MODEL, READING_MODEL])
async def test_models_that_write_no_text_refuse(path: str, model: Any) -> None:
    error = error_of(await post(FakeGenerator(model), path, BODIES[path]))
    assert (error["param"], error["code"]) == ("model", "unsupported_value")


@each_route
async def test_another_model_is_not_found(path: str) -> None:
    error = error_of(await post(FakeGenerator(), path, BODIES[path] | {"model": "other"}), 404)
    assert error["code"] == "model_not_found"


@each_route
async def test_a_key_is_needed_and_a_body_is_bounded(path: str) -> None:
    error_of(await post(FakeGenerator(), path, BODIES[path], api_keys=("sk-a",)), 401)
    error_of(await post(FakeGenerator(), path, BODIES[path] | {"x": "y" * 100}, max_body_bytes=100), 413)


@each_route
async def test_what_the_engine_refuses_about_the_prompt_names_the_field_of_the_route(path: str) -> None:
    generator = FakeGenerator()
    generator.submit_error = InvalidRequestError("too long", param="messages", code="context_length_exceeded")
    error = error_of(await post(generator, path, BODIES[path]))
    assert error["param"] == {DETOKENIZE: "tokens"}.get(path, "prompt")


@each_route
async def test_a_full_server_refuses(path: str) -> None:
    app = app_of(FakeGenerator(script=[TextDelta("a", (1,)), Hang()]), ApiConfig(max_queue=1))
    async with AsgiCall(app, completion(stream=True), path=COMPLETIONS) as call, http_client(app) as client:
        await call.body_until(b'"a"')
        refusal = error_of(await client.post(path, json=BODIES[path]), 503)
        call.leave()
    assert "at a time" in refusal["message"]


async def test_tokenize_answers_as_vllm_does() -> None:
    generator = FakeGenerator()
    body = {"model": "omni", "prompt": "ab", "add_special_tokens": False, "return_token_strs": True}
    answer = (await post(generator, TOKENIZE, body)).json()
    expected = {"count": 2, "max_model_len": 2048, "tokens": [97, 98], "token_strs": ["a", "b"]}
    assert answer == expected
    assert generator.last_request.prompt == Prompt("ab", add_special_tokens=False)
    assert (await post(generator, TOKENIZE, {"prompt": "ab"})).json() == expected | {"token_strs": None}
    assert (await post(generator, DETOKENIZE, {"tokens": [97, 98]})).json() == {"prompt": "ab"}


async def test_tokenize_takes_the_chat_with_its_tools() -> None:
    generator = FakeGenerator()
    body = chat("ab", tools=[tool()], add_generation_prompt=True)
    del body["model"]
    assert (await post(generator, TOKENIZE, body)).json()["tokens"] == [97, 98]
    tools = generator.last_request.tools
    assert tools is not None
    (only,) = tools.tools
    assert isinstance(only, FunctionTool)
    assert only.name == "f"
    assert generator.last_request.prompt is None


async def test_usage_of_a_finished_choice_is_counted_once() -> None:
    generator = FakeGenerator(script=[TextDelta("a", (1,)), finished("length")])
    answer = (await post(generator, COMPLETIONS, completion(n=3))).json()
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["prompt_tokens"] == PROMPT.total
