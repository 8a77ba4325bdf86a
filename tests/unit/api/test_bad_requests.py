"""The client's mistakes: each is a 400 that names the parameter, before anything reaches the generator."""

import json
from typing import Any

import pytest

from omni_server.errors import InvalidRequestError
from tests.unit.api.clients import SPEECH, app_of, base64_of, chat, error_of, post, tone
from tests.unit.api.fake_generator import TEXT_ONLY_MODEL, FakeGenerator


async def refusal_of(body: Any, status: int = 400) -> dict[str, Any]:
    generator = FakeGenerator()
    app = app_of(generator)
    error = error_of(await post(app, body), status)
    assert generator.requests == []
    assert error["type"] == "invalid_request_error"
    # The next request is served.
    assert (await post(app, chat())).status_code == 200
    # A stream is refused in the same way, as JSON.
    if (
        isinstance(body, dict)
        and "stream" not in body
        and "stream_options" not in body
        and "webm" not in str(body)
    ):
        assert error_of(await post(app, body | {"stream": True}), status)["param"] == error["param"]
    return error


LARGE = "x" * (256 * 1024 + 1)


def speech(**audio: Any) -> dict[str, Any]:
    return {"modalities": ["text", "audio"], "audio": audio}


def tool(**function: Any) -> dict[str, Any]:
    """A definition of `f`; a key of `...` is left out."""
    fields = {"name": "f", "parameters": {"type": "object"}} | function
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not ...}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]},
    }


def messages(*given: Any) -> dict[str, Any]:
    return {"model": "omni", "messages": list(given)}


ASKED = {"role": "user", "content": "hi"}
CALL = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "1"}

REFUSED: list[tuple[str, Any, str | None, str]] = [
    # name, body, param, code
    ("model missing", {"messages": [{"role": "user", "content": "hi"}]},
     "model", "missing_required_parameter"),
    ("messages missing", {"model": "omni"}, "messages", "missing_required_parameter"),
    ("messages empty", messages(), "messages", "empty_array"),
    ("messages not a list", {"model": "omni", "messages": "hi"}, "messages", "invalid_type"),
    ("role unknown", messages({"role": "robot", "content": "hi"}), "messages[0].role", "invalid_value"),
    ("content missing", messages({"role": "user"}), "messages[0].content", "missing_required_parameter"),
    ("content null", messages({"role": "user", "content": None}),
     "messages[0].content", "missing_required_parameter"),
    ("content without parts", chat([]), "messages[0].content", "empty_array"),
    ("assistant says nothing", messages({"role": "assistant"}),
     "messages[0].content", "missing_required_parameter"),
    ("part without type", chat([{}]), "messages[0].content[0].type", "missing_required_parameter"),
    ("part of unknown type", chat([{"type": "foo"}]), "messages[0].content[0].type", "invalid_value"),
    ("file part", chat([{"type": "file", "file": {"file_id": "f"}}]),
     "messages[0].content[0].type", "invalid_value"),
    (
        "input_audio missing",
        chat([{"type": "text", "text": "a"}, {"type": "input_audio"}]),
        "messages[0].content[1].input_audio",
        "missing_required_parameter",
    ),
    (
        "input_audio with a typo",
        chat([{"type": "input_audio", "input_audio": {"data": "AAAA", "fmt": "wav"}}]),
        "messages[0].content[0].input_audio.fmt",
        "unknown_parameter",
    ),
    (
        "input_audio of unknown format",
        chat([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "midi"}}]),
        "messages[0].content[0].input_audio.format",
        "invalid_value",
    ),
    (
        "media of the assistant",
        messages({"role": "assistant", "content": [{"type": "image_url", "image_url": "data:,x"}]}),
        "messages[0].content[0].type",
        "unsupported_value",
    ),
    (
        "call in the history without its function",
        messages({"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}),
        "messages[0].tool_calls[0].function",
        "missing_required_parameter",
    ),
    ("modality unknown", chat(modalities=["video"]), "modalities", "invalid_value"),
    ("modalities empty", chat(modalities=[]), "modalities", "empty_array"),
    ("modalities a string", chat(modalities="audio"), "modalities", "invalid_type"),
    ("audio object missing", chat(modalities=["text", "audio"]), "audio", "missing_required_parameter"),
    ("audio null", chat(modalities=["text", "audio"], audio=None), "audio", "missing_required_parameter"),
    ("voice missing", chat(**speech(format="wav")), "audio.voice", "missing_required_parameter"),
    ("voice unknown", chat(**speech(voice="nobody", format="wav")), "audio.voice", "invalid_value"),
    ("format missing", chat(**speech(voice="Ethan")), "audio.format", "missing_required_parameter"),
    ("format unknown", chat(**speech(voice="Ethan", format="webm")), "audio.format", "unsupported_value"),
    ("format m4a", chat(**speech(voice="Ethan", format="m4a")), "audio.format", "unsupported_value"),
    ("audio with a typo", chat(audio={"voice": "Ethan", "fmt": "wav"}), "audio.fmt", "unknown_parameter"),
    ("stream_options without stream", chat(stream_options={}), "stream_options", "invalid_value"),
    ("max_tokens zero", chat(max_tokens=0), "max_tokens", "integer_below_min_value"),
    ("max_tokens negative", chat(max_tokens=-1), "max_tokens", "integer_below_min_value"),
    ("max_tokens a string", chat(max_tokens="5"), "max_tokens", "invalid_type"),
    ("max_tokens a boolean", chat(max_tokens=True), "max_tokens", "invalid_type"),
    ("min_tokens above max_tokens", chat(min_tokens=6, max_tokens=5), "min_tokens", "invalid_value"),
    ("temperature too high", chat(temperature=3), "temperature", "integer_above_max_value"),
    ("temperature negative", chat(temperature=-0.5), "temperature", "decimal_below_min_value"),
    ("temperature beyond a double", chat(temperature=10**400), "temperature", "invalid_type"),
    ("top_p too high", chat(top_p=1.5), "top_p", "decimal_above_max_value"),
    ("presence_penalty too high", chat(presence_penalty=9), "presence_penalty", "integer_above_max_value"),
    ("seed beyond 64 bits", chat(seed=2**63), "seed", "integer_above_max_value"),
    ("seed a decimal", chat(seed=1.5), "seed", "invalid_type"),
    ("five stop strings", chat(stop=list("abcde")), "stop", "array_above_max_length"),
    ("stop string empty", chat(stop=""), "stop", "empty_string"),
    ("n zero", chat(n=0), "n", "integer_below_min_value"),
    ("n two with speech", chat(n=2, **SPEECH), "n", "unsupported_value"),
    ("n beyond 128", chat(n=129), "n", "integer_above_max_value"),
    ("top_logprobs without logprobs", chat(logprobs=False, top_logprobs=0), "top_logprobs", "invalid_value"),
    ("top_logprobs alone", chat(top_logprobs=3), "top_logprobs", "invalid_value"),
    ("top_logprobs too many", chat(logprobs=True, top_logprobs=21),
     "top_logprobs", "integer_above_max_value"),
    ("tools empty", chat(tools=[]), "tools", "empty_array"),
    ("tool_choice without tools", chat(tool_choice="auto"), "tool_choice", "invalid_value"),
    ("functions", chat(functions=[{"name": "f"}]), "functions", "unsupported_value"),
    ("function_call", chat(function_call={"name": "f"}), "function_call", "unsupported_value"),
    ("tool without type", chat(tools=[{"function": {"name": "f"}}]),
     "tools[0].type", "missing_required_parameter"),
    ("custom tool", chat(tools=[{"type": "custom", "custom": {"name": "f"}}]),
     "tools[0].type", "invalid_value"),
    ("tool without function", chat(tools=[{"type": "function"}]),
     "tools[0].function", "missing_required_parameter"),
    ("tool without name", chat(tools=[tool(name=...)]),
     "tools[0].function.name", "missing_required_parameter"),
    ("tool with an odd name", chat(tools=[tool(name="a b")]), "tools[0].function.name", "invalid_value"),
    ("tool with a long name", chat(tools=[tool(name="a" * 65)]), "tools[0].function.name", "invalid_value"),
    ("tool twice", chat(tools=[tool(), tool()]), "tools[1].function.name", "invalid_value"),
    ("129 tools", chat(tools=[tool(name=f"f{i}") for i in range(129)]), "tools", "array_above_max_length"),
    ("tool_choice unknown", chat(tools=[tool()], tool_choice="any"), "tool_choice", "invalid_value"),
    ("tool_choice of another", chat(tools=[tool()], tool_choice=named("g")), "tool_choice", "invalid_value"),
    ("tool_choice named without tools", chat(tool_choice=named("f")), "tool_choice", "invalid_value"),
    (
        "allowed tools of another",
        chat(tools=[tool()], tool_choice=allowed("auto", "f", "g")),
        "tool_choice.allowed_tools.tools",
        "invalid_value",
    ),
    (
        "allowed tools of no mode",
        chat(tools=[tool()], tool_choice=allowed("any", "f")),
        "tool_choice.allowed_tools.mode",
        "invalid_value",
    ),
    (
        "refusal of the user",
        chat([{"type": "text", "text": "hi"}, {"type": "refusal", "refusal": "no"}]),
        "messages[0].content[1].type",
        "unsupported_value",
    ),
    (
        "tool result at the beginning",
        messages({"role": "tool", "tool_call_id": "a", "content": "1"}),
        "messages[0].role",
        "invalid_value",
    ),
    (
        "tool result after an answer in words",
        messages(
            ASKED,
            {"role": "assistant", "content": "hi"},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
        ),
        "messages[2].role",
        "invalid_value",
    ),
    (
        "tool result of a call before the user's message",
        messages(CALL, RESULT, ASKED, RESULT),
        "messages[3].role",
        "invalid_value",
    ),
    (
        "tool result of an unknown call",
        messages(CALL, RESULT, RESULT | {"tool_call_id": "b"}),
        "messages[2].tool_call_id",
        "invalid_value",
    ),
    (
        "tool result without id",
        messages({"role": "tool", "content": "1"}),
        "messages[0].tool_call_id",
        "missing_required_parameter",
    ),
    ("response_format unknown", chat(response_format={"type": "xml"}),
     "response_format.type", "invalid_value"),
    (
        "JSON schema missing",
        chat(response_format={"type": "json_schema"}),
        "response_format.json_schema",
        "missing_required_parameter",
    ),
    (
        "JSON mode with speech",
        chat(response_format={"type": "json_object"}, **SPEECH),
        "response_format",
        "unsupported_value",
    ),
    ("no structure", chat(structured_outputs={}), "structured_outputs", "invalid_value"),
    ("two structures", chat(structured_outputs={"regex": "a", "grammar": "b"}),
     "structured_outputs", "invalid_value"),
    ("unknown structure", chat(structured_outputs={"lark": "a"}),
     "structured_outputs.lark", "unknown_parameter"),
    ("schema that is no JSON", chat(structured_outputs={"json": "{"}),
     "structured_outputs.json", "invalid_value"),
    (
        "structure with speech",
        chat(structured_outputs={"regex": "a"}, **SPEECH),
        "structured_outputs",
        "unsupported_value",
    ),
    (
        "structure and format",
        chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
        "structured_outputs",
        "invalid_value",
    ),
    (
        "structure and tools",
        chat(structured_outputs={"regex": "a"}, tools=[tool()]),
        "structured_outputs",
        "unsupported_value",
    ),
    ("structure without end", chat(structured_outputs={"regex": "a"}, ignore_eos=True),
     "ignore_eos", "invalid_value"),
    ("call without end", chat(tools=[tool()], ignore_eos=True), "ignore_eos", "invalid_value"),
    ("logit_bias of a word", chat(logit_bias={"hello": 1}), "logit_bias", "invalid_value"),
    ("logit_bias of a negative id", chat(logit_bias={"-1": 1}), "logit_bias", "invalid_value"),
    ("logit_bias too high", chat(logit_bias={"5": 101}), "logit_bias.5", "integer_above_max_value"),
    ("too many stop tokens", chat(stop_token_ids=list(range(128))),
     "stop_token_ids", "array_above_max_length"),
    (
        "too many biases",
        chat(logit_bias={str(i): 1 for i in range(1025)}),
        "logit_bias",
        "object_above_max_properties",
    ),
    (
        "too many allowed tokens",
        chat(allowed_token_ids=list(range(1025))),
        "allowed_token_ids",
        "array_above_max_length",
    ),
    (
        "allowed tokens in a structure",
        chat(allowed_token_ids=[1], response_format={"type": "json_object"}),
        "allowed_token_ids",
        "invalid_value",
    ),
    ("allowed tokens in calls", chat(allowed_token_ids=[1], tools=[tool()]),
     "allowed_token_ids", "invalid_value"),
    (
        "schema too large",
        chat(
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"title": LARGE}}}
        ),
        "response_format",
        "value_above_max_size",
    ),
    *(
        (
            f"{field} too large",
            chat(structured_outputs={field: value}),
            f"structured_outputs.{field}",
            "value_above_max_size",
        )
        for field, value in (
            ("json", {"title": LARGE}),
            ("regex", LARGE),
            ("choice", [LARGE[: len(LARGE) // 2]] * 2),
            ("grammar", LARGE),
            ("structural_tag", LARGE),
        )
    ),
    (
        "tools too large together",
        chat(tools=[tool(name=name, description=LARGE[: len(LARGE) // 2]) for name in ("f", "g")]),
        "tools",
        "value_above_max_size",
    ),
    *(
        (
            f"arguments that are no object: {parameters}",
            chat(tools=[tool(), tool(name="g", parameters=parameters)]),
            "tools[1].function.parameters",
            "invalid_function_parameters",
        )
        for parameters in (
            {"type": "string"},
            {"type": ["object", "null"]},
            {"type": None},
            {"enum": [{}, 5]},
            {"const": 5},
            {"anyOf": [{"type": "object"}, {"type": "string"}]},
            {"oneOf": [{"const": 5}]},
            {"allOf": [{"anyOf": [{"type": "array"}]}]},
            {"$ref": "#/$defs/a", "$defs": {"a": {}}},
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "anyOf": [{}]}}},
            {"$ref": "https://example.org/a"},
        )
    ),
    ("empty bad word", chat(bad_words=[""]), "bad_words[0]", "empty_string"),
    (
        "special tokens with speech",
        chat(skip_special_tokens=False, **SPEECH),
        "skip_special_tokens",
        "unsupported_value",
    ),
    ("metadata of 17", chat(metadata={str(i): "" for i in range(17)}),
     "metadata", "object_above_max_properties"),
    ("metadata value too long", chat(metadata={"a": "b" * 513}), "metadata.a", "string_above_max_length"),
    (
        "metadata key too long",
        chat(metadata={"a" * 65: "b"}),
        "metadata." + "a" * 65,
        "string_above_max_length",
    ),
    ("beam search", chat(use_beam_search=True), "use_beam_search", "unsupported_value"),
    ("another template", chat(chat_template="{{ x }}"), "chat_template", "unsupported_value"),
    ("message to continue", chat(continue_final_message=True), "continue_final_message", "unsupported_value"),
    ("no generation prompt", chat(add_generation_prompt=False), "add_generation_prompt", "unsupported_value"),
    ("prompt logprobs", chat(prompt_logprobs=1), "prompt_logprobs", "unsupported_value"),
    ("a suffix", chat(suffix="b"), "suffix", "unsupported_value"),
    (
        "media prepared otherwise",
        chat(mm_processor_kwargs={"use_audio_in_video": True, "fps": 2}),
        "mm_processor_kwargs.fps",
        "unknown_parameter",
    ),
    ("stage unknown", chat(stage_sampling={"singer": {}}), "stage_sampling.singer", "unknown_parameter"),
    ("stage thinker", chat(stage_sampling={"thinker": {}}), "stage_sampling.thinker", "unknown_parameter"),
    (
        "stage key unknown",
        chat(stage_sampling={"talker": {"stop": "a"}}),
        "stage_sampling.talker.stop",
        "unknown_parameter",
    ),
    (
        "stage value out of bounds",
        chat(stage_sampling={"talker": {"temperature": 3}}),
        "stage_sampling.talker.temperature",
        "integer_above_max_value",
    ),
    (
        "stage min_tokens above max_tokens",
        chat(stage_sampling={"talker": {"min_tokens": 3, "max_tokens": 2}}),
        "stage_sampling.talker.min_tokens",
        "invalid_value",
    ),
    ("body a list", [], None, "invalid_type"),
    ("body a string", "hi", None, "invalid_type"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body", "param", "code"), REFUSED, ids=[row[0] for row in REFUSED])
async def test_bad_field_is_refused_with_its_name(name: str, body: Any, param: str | None, code: str) -> None:
    error = await refusal_of(json.loads(json.dumps(body)))
    assert (error["param"], error["code"]) == (param, code)


async def test_unknown_model_is_not_found() -> None:
    error = await refusal_of(chat(model="x" * 1000), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert len(error["message"]) < 300


async def test_unknown_model_is_answered_with_the_names_of_the_served_one() -> None:
    error = await refusal_of(chat(model="gpt-4o"), 404)
    assert (
        error["message"] == "The model 'gpt-4o' does not exist. This server serves: 'org/omni-tiny', 'omni'."
    )


async def test_an_integer_may_be_written_with_a_zero_fraction_as_json_schema_has_it() -> None:
    generator = FakeGenerator()
    body = json.dumps(chat(max_tokens=2.0, seed=-3.0, n=1.0))
    assert "2.0" in body
    assert (await post(app_of(generator), json.loads(body))).status_code == 200
    sampling = generator.last_request.sampling["thinker"]
    assert (sampling.max_tokens, sampling.seed) == (2, -3)
    assert isinstance(sampling.max_tokens, int)


async def test_unknown_voice_names_the_voices_there_are() -> None:
    error = await refusal_of(chat(**speech(voice="nobody", format="wav")))
    assert "Chelsie, Ethan" in error["message"]


async def test_speech_of_a_model_without_a_talker_is_refused() -> None:
    app = app_of(FakeGenerator(TEXT_ONLY_MODEL))
    error = error_of(await post(app, chat(**SPEECH)))
    assert (error["param"], error["code"]) == ("modalities", "unsupported_value")
    error = error_of(await post(app, chat(stage_sampling={"talker": {}})))
    assert (error["param"], error["code"]) == ("stage_sampling.talker", "unknown_parameter")


async def test_what_the_generator_refuses_keeps_its_code() -> None:
    generator = FakeGenerator()
    generator.submit_error = InvalidRequestError("long", param="messages", code="context_length_exceeded")
    error = error_of(await post(app_of(generator), chat()))
    assert error == {
        "message": "long",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


async def test_messages_never_repeat_what_was_sent() -> None:
    secret = base64_of(b"secret" * 1000)
    for body in (
        chat([{"type": "input_audio", "input_audio": {"data": [secret], "format": "wav"}}]),
        chat([{"type": "input_audio", "input_audio": {"data": secret, "format": "wav"}}]),
        chat([{"type": "image_url", "image_url": {"url": {"x": secret}}}]),
        chat([{"type": "image_url", "image_url": "data:image/png;base64," + secret}]),
        chat([{"type": "image_url", "image_url": secret}]),
        chat(max_tokens=secret),
        chat([{"type": secret}]),
        messages({"role": secret, "content": "hi"}),
        chat(**speech(voice=secret, format="wav")),
        chat(**speech(voice="Ethan", format=secret)),
        messages({"role": "assistant", "audio": {"id": secret}}),
    ):
        error = error_of(await post(app_of(FakeGenerator()), body))
        assert secret[:100] not in json.dumps(error)


async def test_unknown_keys_do_not_make_the_parameter_endless() -> None:
    error = error_of(await post(app_of(FakeGenerator()), chat(audio={"x" * 50_000: 1})))
    assert error["code"] == "unknown_parameter"
    assert len(error["param"]) < 300


async def test_valid_audio_beside_a_wrong_field_is_not_decoded() -> None:
    part = {"type": "input_audio", "input_audio": {"data": base64_of(tone()), "format": "wav"}}
    assert (await refusal_of(chat([part], n=2, **SPEECH)))["param"] == "n"
