"""What xgrammar lets the thinker write in a turn with tools."""

import json
from dataclasses import replace

import pytest
import xgrammar

from omni_server.orchestrator.tool_grammar import turn_grammar
from omni_server.types import FunctionTool, StructuredOutput, ToolUse

CITY = '{"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}'
WEATHER = FunctionTool("weather", "{}", CITY)
STOP = FunctionTool("stop", "{}", '{"type": "object", "properties": {}, "additionalProperties": false}')
USE = ToolUse((WEATHER, STOP), frozenset({"weather", "stop"}))
STRICT = replace(USE, tools=(replace(WEATHER, strict=True), STOP))

END = 256  # a token for each byte, and this one
INFO = xgrammar.TokenizerInfo(
    [f"<0x{byte:02X}>" for byte in range(256)] + ["</s>"],
    vocab_type=xgrammar.VocabType.BYTE_FALLBACK,
    stop_token_ids=[END],
)
COMPILER = xgrammar.GrammarCompiler(INFO)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS = call("weather", '{"city": "Paris"}')
NOWHERE = call("weather", '{"city": "Nowhere"}')
STOPPED = call("stop", "{}")


def allows(use: ToolUse, text: str, prose: StructuredOutput | None = None) -> bool:
    grammar = turn_grammar(use, prose)
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(grammar.value))
    return all(matcher.accept_token(byte) for byte in text.encode()) and bool(matcher.accept_token(END))


def test_a_free_model_is_not_constrained() -> None:
    assert turn_grammar(USE, None) is None


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        (PARIS, True),
        (STOPPED, True),
        (PARIS + "\n" + STOPPED, True),
        (NOWHERE, False),
        ("", False),
        ("Hello", False),
        ("Hello " + PARIS, False),
        (PARIS + " Hello", False),
        (call("unknown", "{}"), False),
    ],
)
def test_a_required_call_is_all_that_may_be_written(text: str, is_allowed: bool) -> None:
    assert allows(replace(USE, is_required=True), text) is is_allowed


def test_functions_that_may_not_be_called_in_this_turn_cannot_be() -> None:
    use = replace(USE, callable_names=frozenset({"stop"}))
    assert allows(use, "Hello " + STOPPED)
    assert not allows(use, PARIS)


def test_what_is_no_call_follows_the_schema_of_the_response() -> None:
    numbered = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    schema = StructuredOutput("json", numbered, "response_format")
    assert allows(USE, '{"a": 1}', schema)
    assert allows(USE, NOWHERE, schema)
    assert not allows(USE, '{  "a": 1}', schema)
    assert not allows(USE, "Hello", schema)
    assert not allows(STRICT, NOWHERE, schema)
    grammar = turn_grammar(USE, schema)
    assert grammar is not None
    assert grammar.param == "response_format"
    assert json.loads(grammar.value)["type"] == "structural_tag"


def test_arguments_are_an_object_where_the_schema_does_not_say_so() -> None:
    required = ToolUse((FunctionTool("f", "{}", "{}"),), frozenset({"f"}), is_required=True)
    assert allows(required, call("f", '{"a": 1}'))
    assert not allows(required, call("f", "5"))
