"""Constraints on the text of an answer: calls of the given tools, and a format.

They become one grammar, whose compile time grows with its length.
"""

import json
from collections.abc import Mapping, Sequence

from omni_server.api.schemas import (
    AllowedToolsChoice,
    ChatCompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    StructuredOutputs,
    TextFields,
    Tool,
)
from omni_server.api.validation import unsupported
from omni_server.errors import InvalidRequestError
from omni_server.types import FunctionTool, StructuredOutput, StructuredOutputKind, ToolUse

MAX_GRAMMAR_BYTES = 256 * 1024
"""The grammar built from it is several times as large; build time grows with its length."""

_ANY_OBJECT = '{"type": "object"}'
_NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}}
_COMBINED = ("anyOf", "oneOf", "allOf")


def tool_use(body: ChatCompletionRequest) -> ToolUse | None:
    """Returns None if no tool may be called; the prompt then omits them too.
    Raises `InvalidRequestError`."""
    choice = body.tool_choice
    if body.tools is None:
        if choice is not None and choice != "none":
            raise InvalidRequestError(
                "'tool_choice' is allowed only where 'tools' are given.", param="tool_choice"
            )
        return None
    _check_names(body.tools)
    tools = tuple(
        function_tool(
            tool.function.name,
            tool.function.description,
            tool.function.parameters,
            f"tools[{index}].function",
            strict=tool.function.strict is True,
        )
        for index, tool in enumerate(body.tools)
    )
    check_grammar_size(*(tool.definition for tool in tools), param="tools")
    names = frozenset(tool.name for tool in tools)
    is_required = False
    match choice:
        case "none":
            return None
        case "required":
            is_required = True
        case NamedTool():
            names, is_required = _known([choice], names, "tool_choice"), True
        case AllowedToolsChoice(allowed_tools=allowed):
            names = _known(allowed.tools, names, "tool_choice.allowed_tools.tools")
            is_required = allowed.mode == "required"
    is_parallel = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    return ToolUse(tools, names, is_required=is_required, is_parallel=is_parallel)


def _check_names(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in seen:
            raise InvalidRequestError(
                f"Invalid 'tools[{index}].function.name': '{name}' is given twice.",
                param=f"tools[{index}].function.name",
            )
        seen.add(name)


def _known(wanted: Sequence[NamedTool], names: frozenset[str], param: str) -> frozenset[str]:
    for tool in wanted:
        if tool.function.name not in names:
            raise InvalidRequestError(
                f"Invalid value for '{param}': "
                f"there is no function '{tool.function.name[:64]}' among 'tools'.",
                param=param,
            )
    return frozenset(tool.function.name for tool in wanted)


def function_tool(
    name: str,
    description: str | None,
    parameters: Mapping[str, object] | None,
    param: str,
    *,
    strict: bool = False,
) -> FunctionTool:
    """`param` is the request field of the function. Raises `InvalidRequestError` if `parameters` is not an
    object schema."""
    given = {"name": name, "description": description, "parameters": parameters}
    shown = {key: value for key, value in given.items() if value is not None}
    return FunctionTool(
        name=name,
        # Matches transformers' `tojson` in chat templates.
        definition=json.dumps({"type": "function", "function": shown}, ensure_ascii=False),
        parameters=json.dumps(schema_of_object(name, parameters, f"{param}.parameters")),
        strict=strict,
    )


def structured_output(body: TextFields, *, with_speech: bool, with_tools: bool) -> StructuredOutput | None:
    """Returns None for free text. Raises `InvalidRequestError` for invalid combinations."""
    output: StructuredOutput | None = None
    match body.response_format:
        case JsonObjectFormat():
            output = StructuredOutput("json", _ANY_OBJECT, "response_format")
        case JsonSchemaFormat(json_schema=given):
            schema = _ANY_OBJECT if given.json_schema is None else json.dumps(given.json_schema)
            output = StructuredOutput("json", schema, "response_format")
    if body.structured_outputs is not None:
        if output is not None:
            raise InvalidRequestError(
                "'structured_outputs' and 'response_format' cannot be combined.", param="structured_outputs"
            )
        if with_tools:
            raise unsupported(
                "'structured_outputs' cannot be combined with 'tools'; 'response_format' can.",
                "structured_outputs",
            )
        output = _structured_outputs(body.structured_outputs)
    if output is not None:
        check_grammar_size(output.value, param=output.param)
    if output is not None and with_speech:
        param = output.param.partition(".")[0]
        raise unsupported(
            f"'{param}' is supported only where the answer is text: 'modalities' must not hold 'audio'.",
            param,
        )
    is_constrained = output is not None or with_tools
    if body.ignore_eos and is_constrained:
        raise InvalidRequestError(
            "'ignore_eos' cannot be combined with structured outputs or 'tools', "
            "which say where the answer ends.",
            param="ignore_eos",
        )
    if body.allowed_token_ids is not None and is_constrained:
        raise InvalidRequestError(
            "'allowed_token_ids' cannot be combined with structured outputs or 'tools': "
            "no token might be left that both allow.",
            param="allowed_token_ids",
        )
    return output


def _structured_outputs(given: StructuredOutputs) -> StructuredOutput:
    choice = None if given.choice is None else json.dumps(given.choice)
    schema = None if given.json_schema is None else _json_text(given.json_schema)
    values: tuple[tuple[StructuredOutputKind, str, str | None], ...] = (
        ("json", "json", schema),
        ("json", "json_object", None if given.json_object is None else _ANY_OBJECT),
        ("regex", "regex", given.regex),
        ("choice", "choice", choice),
        ("grammar", "grammar", given.grammar),
        ("structural_tag", "structural_tag", given.structural_tag),
    )
    found = [
        StructuredOutput(kind, value, f"structured_outputs.{field}")
        for kind, field, value in values
        if value is not None
    ]
    if len(found) != 1:
        raise InvalidRequestError(
            f"Exactly one field of 'structured_outputs' must be given, not {len(found)}.",
            param="structured_outputs",
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


def check_grammar_size(*texts: str, param: str) -> None:
    """Raises `InvalidRequestError` if `texts`, which form one grammar, are too large."""
    if sum(len(text.encode(errors="surrogatepass")) for text in texts) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"Invalid '{param}': at most {MAX_GRAMMAR_BYTES // 1024} KiB are allowed.",
            param=param,
            code="value_above_max_size",
        )


def schema_of_object(name: str, parameters: Mapping[str, object] | None, param: str) -> Mapping[str, object]:
    """The parameters of the function `name`, with `"type": "object"` added where missing.

    None means that the function has no parameters; an empty schema means any object. xgrammar evaluates
    other keywords before `type`, so their branches get the type too. Raises `InvalidRequestError` for a
    schema that allows non-objects.
    """
    if parameters is None:
        return _NO_PARAMETERS
    root = parameters

    def refused(found: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"Invalid schema for function '{name}': "
            f"schema must be a JSON schema of 'type: \"object\"', {found}.",
            param=param,
            code="invalid_function_parameters",
        )

    def typed(schema: Mapping[str, object]) -> Mapping[str, object]:
        if schema.get("type", "object") != "object":
            raise refused(f"got 'type: {_shown(schema['type'])}'")
        enum = schema.get("enum", [])
        values = [*(enum if isinstance(enum, list) else [enum]), schema.get("const", {})]
        if not all(isinstance(value, dict) for value in values):
            raise refused("but 'enum' or 'const' holds other values")
        if "$ref" in schema and not _is_plain_object(root, schema["$ref"]):
            raise refused(f"but '$ref: {_shown(schema['$ref'])}' does not lead to one")
        whole: dict[str, object] = {**schema, "type": "object"}
        for key in _COMBINED:
            branches = schema.get(key)
            if isinstance(branches, list):
                whole[key] = [typed(branch) if isinstance(branch, dict) else branch for branch in branches]
        return whole

    return typed(root)


def _is_plain_object(root: Mapping[str, object], reference: object) -> bool:
    """Whether the referenced schema itself declares `"type": "object"` without combining keywords."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return False
    here: object = root
    for key in reference[1:].split("/")[1:]:
        here = here.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(here, dict) else None
    if not isinstance(here, dict) or here.get("type") != "object":
        return False
    return here.keys().isdisjoint((*_COMBINED, "$ref", "enum", "const"))


def _shown(value: object) -> str:
    return (value if isinstance(value, str) else json.dumps(value))[:64]
