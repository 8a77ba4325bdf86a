"""`response_format` and `structured_outputs` as one thing."""

import json

from omni_server.api.grammar_size import check_grammar_size
from omni_server.api.schemas import ChatCompletionRequest
from omni_server.api.structure_schemas import JsonObjectFormat, JsonSchemaFormat, StructuredOutputs
from omni_server.errors import InvalidRequestError
from omni_server.types import StructuredOutput

_ANY_OBJECT = '{"type": "object"}'


def structured_output(body: ChatCompletionRequest, *, with_speech: bool, with_tools: bool) -> StructuredOutput | None:
    """None where the text is free. Raises `InvalidRequestError` for what cannot be combined."""
    output = _response_format(body)
    if body.structured_outputs is not None:
        if output is not None:
            raise InvalidRequestError(
                "'structured_outputs' and 'response_format' cannot be combined.", param="structured_outputs"
            )
        if with_tools:
            raise InvalidRequestError(
                "'structured_outputs' cannot be combined with 'tools'; 'response_format' can.",
                param="structured_outputs",
                code="unsupported_value",
            )
        output = _structured_outputs(body.structured_outputs)
    if output is not None:
        check_grammar_size(output.value, param=output.param)
    if output is not None and with_speech:
        param = output.param.partition(".")[0]
        raise InvalidRequestError(
            f"'{param}' is supported only where the answer is text: 'modalities' must not hold 'audio'.",
            param=param,
            code="unsupported_value",
        )
    return output


def _response_format(body: ChatCompletionRequest) -> StructuredOutput | None:
    match body.response_format:
        case JsonObjectFormat():
            return StructuredOutput("json", _ANY_OBJECT, "response_format")
        case JsonSchemaFormat(json_schema=given):
            schema = _ANY_OBJECT if given.json_schema is None else json.dumps(given.json_schema)
            return StructuredOutput("json", schema, "response_format")
        case _:
            return None


def _structured_outputs(given: StructuredOutputs) -> StructuredOutput:
    found: list[StructuredOutput] = []
    if given.json_schema is not None:
        found.append(StructuredOutput("json", _json_text(given.json_schema), "structured_outputs.json"))
    if given.json_object is not None:
        found.append(StructuredOutput("json", _ANY_OBJECT, "structured_outputs.json_object"))
    if given.regex is not None:
        found.append(StructuredOutput("regex", given.regex, "structured_outputs.regex"))
    if given.choice is not None:
        found.append(StructuredOutput("choice", json.dumps(given.choice), "structured_outputs.choice"))
    if given.grammar is not None:
        found.append(StructuredOutput("grammar", given.grammar, "structured_outputs.grammar"))
    if given.structural_tag is not None:
        found.append(StructuredOutput("structural_tag", given.structural_tag, "structured_outputs.structural_tag"))
    if len(found) != 1:
        raise InvalidRequestError(
            f"Exactly one field of 'structured_outputs' must be given, not {len(found)}.", param="structured_outputs"
        )
    return found[0]


def _json_text(schema: dict[str, object] | str) -> str:
    if not isinstance(schema, str):
        return json.dumps(schema)
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise InvalidRequestError(
            "Invalid 'structured_outputs.json': expected a JSON schema, as an object or as its text.",
            param="structured_outputs.json",
        )
    return schema
