"""Log-probabilities, several choices, structured outputs and tools over HTTP, on the real server.

The demo model babbles, so that what it writes by itself shows nothing; what it can be held to does.
"""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import jsonschema
import numpy as np
import openai
import pytest
import torch

from omni_server.types import ChatMessage, TextPart
from omni_server.verify.compare import signal_to_noise_db
from tests.integration.parity import NOISE_SEED, expected
from tests.integration.test_server import (
    GREEDY,
    GREEDY_TALKER,
    HELLO,
    answer_to,
    message_of,
    num_tokens,
    outcome,
    samples_of,
    spoken,
    stream_of,
    text_of,
    usage_of,
    written,
)
from tests.integration.test_streaming import CHUNKED_SNR_DB
from tests.omni_families import QWEN2_5_OMNI, OmniFamily, for_each_family
from tests.reference.case_reference import Result
from tests.reference.cases import SPEECH_SYSTEM_PROMPT, Case, say
from tests.reference.qwen3_reference import Qwen3Reference
from tests.reference.reference import Reference
from tests.unit.api.clients import URL, error_of
from tests.unit.api.sse_validator import StreamedAnswer, parse_frames
from tests.unit.api.test_bad_requests import named, tool

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
TRIP = tool(name="plan_trip", description="Plans a trip.", parameters=SCHEMA)
STOP = tool(name="stop", parameters={"type": "object", "properties": {}, "additionalProperties": False})
LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 1}


@pytest.fixture(scope="module")
def own_reference(request: pytest.FixtureRequest, family: OmniFamily) -> Reference | Qwen3Reference:
    """Of the family that `server` serves."""
    own: Reference | Qwen3Reference = request.getfixturevalue(
        "reference" if family is QWEN2_5_OMNI else "qwen3_reference"
    )
    return own


def entries_of(completion: dict[str, Any]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = completion["choices"][0]["logprobs"]["content"]
    return entries


def streamed_entries(answer: StreamedAnswer) -> list[dict[str, Any]]:
    choices = [chunk["choices"][0] for chunk in answer.chunks if chunk["choices"]]
    return [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]


def joined(entries: list[dict[str, Any]]) -> str:
    return bytes(byte for entry in entries for byte in entry["bytes"] or []).decode()


def calls_of(completion: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = message_of(completion)["tool_calls"]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def call_pieces(answer: StreamedAnswer) -> list[dict[str, Any]]:
    choices = [choice for chunk in answer.chunks for choice in chunk["choices"]]
    return [piece for choice in choices for piece in choice["delta"].get("tool_calls", [])]


# -- log-probabilities


@for_each_family
@pytest.mark.parametrize("make", [written, spoken])
def test_greedy_tokens_are_the_likeliest_and_join_to_the_text(client: httpx2.Client, make: Any) -> None:
    whole = answer_to(client, make(logprobs=True, top_logprobs=3))
    entries = entries_of(whole)
    assert joined(entries) == text_of(whole)
    assert num_tokens(whole)[0] - len(entries) in (0, 1)  # the end token is no part of the text
    for entry in entries:
        top = entry["top_logprobs"]
        assert len(top) == 3
        assert top[0] == {name: entry[name] for name in ("token", "logprob", "bytes")}
        assert 0 >= top[0]["logprob"] >= top[1]["logprob"] >= top[2]["logprob"]
    assert outcome(whole) == outcome(answer_to(client, make()))


@pytest.mark.parametrize("make", [written, spoken])
def test_streamed_log_probabilities_are_the_same(client: httpx2.Client, make: Any) -> None:
    body = make(logprobs=True, top_logprobs=2)
    streamed, whole = streamed_entries(stream_of(client, body)), entries_of(answer_to(client, body))
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in whole]
    for got, wanted in zip(streamed, whole, strict=True):
        assert got["logprob"] == pytest.approx(wanted["logprob"], abs=1e-4)
        assert [top["token"] for top in got["top_logprobs"]] == [
            top["token"] for top in wanted["top_logprobs"]
        ]


@for_each_family
def test_log_probabilities_are_those_of_the_reference(
    client: httpx2.Client, own_reference: Reference | Qwen3Reference
) -> None:
    """Also of sampled tokens: they are the model's own, before temperature and the like."""
    for fields in ({}, {"temperature": 1, "seed": 5, "top_k": 20}):
        entries = entries_of(answer_to(client, written(logprobs=True, top_logprobs=2, **fields)))
        tokenizer = own_reference.processor.tokenizer
        prompt = own_reference.prompt((ChatMessage("user", (TextPart(HELLO),)),))["input_ids"]
        text_ids = [tokenizer.encode(entry["token"], add_special_tokens=False)[0] for entry in entries]
        ids = torch.cat([prompt, torch.tensor([text_ids])], dim=1)
        with torch.inference_mode():
            logits = own_reference.model.thinker(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        expected = torch.log_softmax(logits[0].float(), dim=-1)[prompt.shape[1] - 1 : -1]
        sampled = expected[torch.arange(len(text_ids)), torch.tensor(text_ids)]
        assert [entry["logprob"] for entry in entries] == pytest.approx(sampled.tolist(), abs=2e-3)
        best = expected.topk(2).values.tolist()
        got = [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries]
        assert got == [pytest.approx(pair, abs=2e-3) for pair in best]


def test_log_probabilities_end_where_a_stop_string_cuts_the_text(client: httpx2.Client) -> None:
    text = text_of(answer_to(client, written()))
    stop = text.split()[4]
    stopped = answer_to(client, written(stop=stop, logprobs=True))
    assert text_of(stopped) == text[: text.index(stop)]
    assert text_of(stopped).startswith(joined(entries_of(stopped)))
    assert (
        len(text_of(stopped)) - len(joined(entries_of(stopped))) <= 1
    )  # the space in the token that was cut
    shown = answer_to(client, written(stop=stop, include_stop_str_in_output=True))
    assert text_of(shown) == text[: text.index(stop)] + stop


# -- single tokens


def test_single_tokens_are_barred_and_forced(client: httpx2.Client, reference: Reference) -> None:
    first = entries_of(answer_to(client, written(logprobs=True)))[0]["token"]
    first_id, comma_id = (
        reference.processor.tokenizer.encode(text, add_special_tokens=False)[0] for text in (first, ",")
    )
    barred = answer_to(client, written(logit_bias={str(first_id): -100}))
    assert first not in text_of(barred)
    only = answer_to(client, written(allowed_token_ids=[first_id], max_tokens=3))
    assert text_of(only) == first * 3
    commas = {str(comma_id): 100}
    assert text_of(answer_to(client, written(logit_bias=commas, max_tokens=3))) == ",,,"
    without = text_of(answer_to(client, written(logit_bias=commas, bad_words=[","])))
    assert without
    assert "," not in without


@for_each_family
@pytest.mark.parametrize("fields", [{}, {"stop": "nothing"}], ids=["free", "with a stop string"])
def test_text_that_ends_inside_a_character_ends_with_a_replacement_character(
    client: httpx2.Client, own_reference: Reference | Qwen3Reference, fields: dict[str, Any]
) -> None:
    tokenizer = own_reference.processor.tokenizer
    begin_id = tokenizer.encode("é", add_special_tokens=False)[0]
    text = tokenizer.decode([begin_id])
    assert text == "\ufffd"
    body: dict[str, Any] = {"allowed_token_ids": [begin_id], "max_tokens": 3} | fields
    answer = answer_to(client, written(logprobs=True, **body))
    assert text_of(answer) == 3 * text
    assert [entry["bytes"] for entry in entries_of(answer)] == 3 * [list("é".encode()[:1])]
    assert stream_of(client, written(**body)).text == 3 * text
    heard = answer_to(client, spoken(**body))
    assert text_of(heard) == stream_of(client, spoken(**body)).transcript == 3 * text
    assert outcome(heard) == outcome(answer_to(client, spoken(**body | {"stop": None})))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"allowed_token_ids": [99999999]}, "allowed_token_ids"),
        ({"stop_token_ids": [99999999]}, "stop_token_ids"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "foo"}}}},
         "response_format"),
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a\0"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "nonsense ::"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"tools": [tool(parameters={"properties": {"a": {"type": "foo"}}})], "tool_choice": "required"}, "tools"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_would_refuse_is_refused_before_a_stream_begins(
    client: httpx2.Client, fields: dict[str, Any], param: str, stream: bool
) -> None:
    error = error_of(client.post(URL, json=written(stream=stream, **fields)))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert "/project/" not in error["message"]
    assert '"foo"' not in json.dumps(fields) or '"foo"' in error["message"], (
        "the message does not say what is wrong"
    )


# -- several choices


def test_choices_differ_and_are_repeatable_by_their_seed(client: httpx2.Client) -> None:
    body = written(n=3, temperature=1, seed=21)
    first, again = answer_to(client, body), answer_to(client, body)
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert texts == [choice["message"]["content"] for choice in again["choices"]]
    singles = [text_of(answer_to(client, written(temperature=1, seed=21 + index))) for index in range(3)]
    assert texts == singles
    assert first["usage"]["completion_tokens"] > 3


def test_streamed_choices_are_the_same(client: httpx2.Client) -> None:
    body = written(n=2, temperature=1, seed=21)
    whole = [choice["message"]["content"] for choice in answer_to(client, body)["choices"]]
    response = client.post(URL, json=body | {"stream": True})
    chunks = [json.loads(payload) for payload in parse_frames(response.text)[:-1]]
    texts = ["", ""]
    for chunk in chunks:
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == whole


def test_64_callers_at_once_are_all_answered(client: httpx2.Client) -> None:
    with ThreadPoolExecutor(64) as threads:
        texts = list(threads.map(lambda _: text_of(answer_to(client, written(max_tokens=4))), range(64)))
    assert len(set(texts)) == 1


def test_characters_of_several_tokens_are_never_cut(client: httpx2.Client) -> None:
    """The demo vocabulary has only bytes for them."""
    text = "é👋🏽ß"
    body = written(max_tokens=40, structured_outputs={"choice": [text]}, logprobs=True)
    streamed = stream_of(client, body)
    assert streamed.text == text
    assert joined(streamed_entries(streamed)) == text
    assert len(streamed_entries(streamed)) == len(text.encode())


# -- structured outputs


def test_answer_follows_a_json_schema(client: httpx2.Client) -> None:
    body = written(**LONG, response_format=AS_SCHEMA, seed=1)
    whole = answer_to(client, body)
    assert whole["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(text_of(whole)), SCHEMA)
    assert stream_of(client, body).text == text_of(whole)


def test_official_client_parses_an_answer_into_a_model(official: openai.OpenAI) -> None:
    completion = official.chat.completions.create(
        model="omni",
        messages=[{"role": "user", "content": "Where to?"}],
        response_format={"type": "json_schema", "json_schema": AS_SCHEMA["json_schema"]},  # type: ignore[typeddict-item]
        max_completion_tokens=400,
        seed=4,
        n=2,
    )
    for choice in completion.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": AS_SCHEMA},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": SCHEMA}},
        {"tools": [TRIP], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [TRIP], "tool_choice": named("plan_trip")},
        {"tools": [TRIP], "response_format": AS_SCHEMA},
    ],
    ids=["json_schema", "json_object", "json", "required", "named", "tools or json_schema"],
)
def test_json_of_a_model_that_prefers_white_space_ends_by_itself(
    client: httpx2.Client, own_reference: Reference | Qwen3Reference, fields: dict[str, Any]
) -> None:
    encode = own_reference.processor.tokenizer.encode
    preferred = {" ": 100, "\n": 100, "{": 70, "}": 50, "<": -100}
    bias = {str(encode(text, add_special_tokens=False)[0]): bias for text, bias in preferred.items()}
    choice = answer_to(client, written(max_tokens=150, logit_bias=bias, **fields))["choices"][0]
    assert choice["finish_reason"] in ("stop", "tool_calls")
    calls = choice["message"].get("tool_calls")
    text = calls[0]["function"]["arguments"] if calls else choice["message"]["content"]
    jsonschema.validate(json.loads(text), {} if "json_object" in str(fields) else SCHEMA)


def test_answer_follows_vllms_structures(client: httpx2.Client) -> None:
    def answer(**structure: Any) -> str:
        return text_of(answer_to(client, written(**LONG, structured_outputs=structure)))

    assert answer(choice=["yes", "no"]) in ("yes", "no")
    assert answer(regex="[0-9]{3}").isdecimal()
    assert answer(grammar='root ::= "a" | "b"') in ("a", "b")
    jsonschema.validate(json.loads(answer(json=SCHEMA)), SCHEMA)


@pytest.mark.parametrize(
    ("structure", "why"),
    [
        ({"json": {"enum": ["".join(random.Random(1).choices("abcdefghij ", k=240_000))]}}, "too much time"),
        ({"regex": "(([a-zA-Z ]?){1,30}){1,30}!"}, "too long to follow"),
    ],
)
def test_structure_that_takes_too_much_time_is_refused_and_others_are_answered(
    client: httpx2.Client, structure: dict[str, object], why: str
) -> None:
    error = error_of(client.post(URL, json=written(structured_outputs=structure)), 400)
    assert error["code"] == "unsupported_value"
    assert why in error["message"]
    # What was given up may still run.
    assert text_of(answer_to(client, written()))
    assert text_of(answer_to(client, written(structured_outputs={"choice": ["Paris", "Rome"]}))) in (
        "Paris",
        "Rome",
    )


def test_held_answers_and_free_ones_do_not_disturb_each_other(client: httpx2.Client) -> None:
    held = written(**LONG, response_format=AS_SCHEMA, seed=1)
    bodies = [held, written(), spoken(), held | {"seed": 2}, written("Bye")] * 2
    alone = [outcome(answer_to(client, body)) for body in bodies[:5]]
    with ThreadPoolExecutor(len(bodies)) as threads:
        together = list(threads.map(lambda body: outcome(answer_to(client, body)), bodies))
    assert [text for text, _ in together] == [text for text, _ in alone] * 2


# -- tools


def test_required_call_has_arguments_by_the_schema(client: httpx2.Client) -> None:
    body = written(**LONG, tools=[TRIP], tool_choice="required", parallel_tool_calls=False, seed=1)
    whole = answer_to(client, body)
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert message_of(whole)["content"] is None
    ((name, arguments),) = calls_of(whole)
    assert name == "plan_trip"
    jsonschema.validate(arguments, SCHEMA)

    streamed = stream_of(client, body)
    pieces = call_pieces(streamed)
    assert [piece["function"].get("name") for piece in pieces] == ["plan_trip"] + [None] * (len(pieces) - 1)
    joined_arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    assert joined_arguments == message_of(whole)["tool_calls"][0]["function"]["arguments"]
    assert (streamed.finish_reason, streamed.text) == ("tool_calls", "")
    assert usage_of(streamed) == usage_of(whole)


@pytest.mark.parametrize("max_tokens", [6, 50])
def test_call_that_the_limit_cuts_has_no_markup(client: httpx2.Client, max_tokens: int) -> None:
    body = written(max_tokens=max_tokens, tools=[TRIP], tool_choice="required")
    whole, streamed = answer_to(client, body), stream_of(client, body)
    assert whole["choices"][0]["finish_reason"] == streamed.finish_reason == "length"
    assert text_of(whole) in (None, "")
    assert streamed.text == ""
    functions = [call["function"] for call in message_of(whole).get("tool_calls", [])]
    pieces = [piece["function"] for piece in call_pieces(streamed)]
    assert [function["name"] for function in functions] == [piece["name"] for piece in pieces[:1]]
    assert "".join(function["arguments"] for function in functions) == "".join(
        piece["arguments"] for piece in pieces
    )
    assert bool(functions) == (max_tokens == 50)


def test_named_function_is_called_and_ends_with_stop(client: httpx2.Client) -> None:
    whole = answer_to(client, written(**LONG, tools=[TRIP, STOP], tool_choice=named("stop")))
    assert calls_of(whole) == [("stop", {})]
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_call_that_was_asked_for_by_voice_is_silent(client: httpx2.Client) -> None:
    whole = answer_to(client, spoken(**LONG, tools=[STOP], tool_choice="required", parallel_tool_calls=False))
    assert calls_of(whole) == [("stop", {})]
    assert message_of(whole)["audio"] is None
    assert num_tokens(whole)[1] == 0


def of_the_reference(reference: Reference | Qwen3Reference, system: str) -> Result:
    """What it answers to `HELLO`, within the limits of `spoken`."""
    if isinstance(reference, Reference):
        system = f"{SPEECH_SYSTEM_PROMPT}\n\n{system}"
    messages = (say("system", system), say("user", HELLO))
    case = Case("tools", messages, "Chelsie", GREEDY["max_tokens"], GREEDY_TALKER["max_tokens"])
    return expected(reference, case).result


@for_each_family
def test_prose_in_a_turn_with_tools_is_spoken_as_ever(
    family: OmniFamily, client: httpx2.Client, own_reference: Reference | Qwen3Reference
) -> None:
    """The reference is told of no tools: it reads a system message that spells them, its tags as tokens."""
    definition = json.dumps({"type": "function", "function": STOP["function"]})
    tools_text = (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{definition}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    want = of_the_reference(own_reference, tools_text)
    with_tools = answer_to(client, spoken(tools=[STOP], seed=NOISE_SEED))
    assert with_tools["usage"]["prompt_tokens"] == len(want.prompt_ids)
    assert num_tokens(with_tools)[0] == len(want.text_ids)
    assert family.num_samples(num_tokens(with_tools)[1]) == len(want.waveform) > 0
    transcript = message_of(with_tools)["audio"]["transcript"]
    assert transcript == own_reference.processor.tokenizer.decode(want.text_ids, skip_special_tokens=True)
    sound = samples_of(with_tools) / np.float32(32768)
    assert signal_to_noise_db(want.waveform, sound) > CHUNKED_SNR_DB
    streamed = stream_of(client, spoken(tools=[STOP], seed=NOISE_SEED))
    assert (streamed.transcript, streamed.data) == outcome(with_tools)


@for_each_family
def test_call_that_a_free_model_makes_is_silent_and_what_it_says_before_is_not(
    family: OmniFamily, client: httpx2.Client, own_reference: Reference | Qwen3Reference
) -> None:
    """A bias makes the model begin a call at some time; from there on it is held to a strict function."""
    (tag,) = own_reference.processor.tokenizer.encode("<tool_call>", add_special_tokens=False)
    strict = tool(name="stop", parameters=STOP["function"]["parameters"], strict=True)
    body = spoken(tools=[strict], temperature=1, parallel_tool_calls=False, max_tokens=200)
    said = []
    for seed in range(1, 7):
        whole = answer_to(client, body | {"seed": seed, "logit_bias": {str(tag): 9.0}})
        message = message_of(whole)
        assert calls_of(whole) == [("stop", {})]
        assert whole["choices"][0]["finish_reason"] in (
            "tool_calls",
            "length",
        )  # the talker may come to its limit
        if message["audio"] is None:
            assert num_tokens(whole)[1] == 0
        else:
            assert message["audio"]["transcript"]
            assert "tool_call" not in message["audio"]["transcript"]
            assert samples_of(whole).size == family.num_samples(num_tokens(whole)[1])
            said.append(seed)
    assert said
    certain = answer_to(client, body | {"seed": 1, "logit_bias": {str(tag): 100}})
    assert message_of(certain)["audio"] is None


def test_results_of_calls_are_read(client: httpx2.Client) -> None:
    body = written(tools=[TRIP])
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "plan_trip", "arguments": '{"city":"Rome"}'},
    }
    body["messages"] += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    answers = []
    for result in ("It is booked.", "There is no room."):
        turn = {"role": "tool", "tool_call_id": "call_1", "content": result}
        answers.append(text_of(answer_to(client, body | {"messages": [*body["messages"], turn]})))
    assert answers[0] != answers[1]
