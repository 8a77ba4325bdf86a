"""What the text must look like: OpenAI's `response_format` and vLLM's `structured_outputs`."""

import json
from typing import Any

import pytest

from omni_server.types import StructuredOutput
from tests.unit.api.clients import request_for
from tests.unit.api.test_bad_requests import tool

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY_OBJECT = '{"type": "object"}'


async def structure_of(**fields: Any) -> StructuredOutput | None:
    return (await request_for(**fields)).structured_output


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", **fields}}


@pytest.mark.parametrize("response_format", [None, {"type": "text"}])
async def test_text_is_free_by_default(response_format: Any) -> None:
    assert await structure_of(response_format=response_format) is None


async def test_schema_reaches_the_model() -> None:
    got = await structure_of(response_format=json_schema(schema=SCHEMA, strict=True, description="d"))
    assert got == StructuredOutput("json", json.dumps(SCHEMA), "response_format")


@pytest.mark.parametrize("response_format", [{"type": "json_object"}, json_schema()])
async def test_any_object_will_do_without_a_schema(response_format: Any) -> None:
    assert await structure_of(response_format=response_format) == StructuredOutput(
        "json", ANY_OBJECT, "response_format"
    )


@pytest.mark.parametrize(
    ("field", "kind", "value"),
    [
        ({"json": SCHEMA}, "json", json.dumps(SCHEMA)),
        ({"json": '{"type":"object"}'}, "json", '{"type":"object"}'),
        ({"json_object": True}, "json", ANY_OBJECT),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["yes", "né"]}, "choice", json.dumps(["yes", "né"])),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"structural_tag": "{}"}, "structural_tag", "{}"),
    ],
)
async def test_vllms_field_reaches_the_model(field: dict[str, Any], kind: Any, value: str) -> None:
    got = await structure_of(structured_outputs=field)
    assert got == StructuredOutput(kind, value, f"structured_outputs.{next(iter(field))}")


async def test_format_and_tools_go_together() -> None:
    got = await structure_of(response_format={"type": "json_object"}, tools=[tool()])
    assert got is not None


async def test_tools_that_may_not_be_called_do_not_matter() -> None:
    got = await structure_of(structured_outputs={"regex": "a"}, tools=[tool()], tool_choice="none")
    assert got == StructuredOutput("regex", "a", "structured_outputs.regex")
