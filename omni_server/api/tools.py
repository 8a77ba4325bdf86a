"""`tools`, `tool_choice` and `parallel_tool_calls` as one thing."""

import json
from collections.abc import Sequence

from omni_server.api.grammar_size import check_grammar_size
from omni_server.api.schemas import ChatCompletionRequest
from omni_server.api.tool_parameters import schema_of_object
from omni_server.api.tool_schemas import AllowedToolsChoice, NamedTool, Tool
from omni_server.errors import InvalidRequestError
from omni_server.types import FunctionTool, ToolUse


def tool_use(body: ChatCompletionRequest) -> ToolUse | None:
    """None where no tool may be called: then the prompt does not show them either. Raises `InvalidRequestError`."""
    choice = body.tool_choice
    if body.tools is None:
        if choice is not None and choice != "none":
            raise InvalidRequestError("'tool_choice' is allowed only where 'tools' are given.", param="tool_choice")
        return None
    _check_names(body.tools)
    tools = tuple(_function_tool(tool, f"tools[{index}].function") for index, tool in enumerate(body.tools))
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


def is_named(body: ChatCompletionRequest) -> bool:
    """The request says which function to call."""
    return isinstance(body.tool_choice, NamedTool)


def _check_names(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in seen:
            raise InvalidRequestError(
                f"Invalid 'tools[{index}].function.name': '{name}' is there twice.",
                param=f"tools[{index}].function.name",
            )
        seen.add(name)


def _known(wanted: Sequence[NamedTool], names: frozenset[str], param: str) -> frozenset[str]:
    for tool in wanted:
        if tool.function.name not in names:
            raise InvalidRequestError(
                f"Invalid value for '{param}': there is no function '{tool.function.name[:64]}' among 'tools'.",
                param=param,
            )
    return frozenset(tool.function.name for tool in wanted)


def _function_tool(tool: Tool, param: str) -> FunctionTool:
    function = tool.function
    shown = {
        name: value
        for name, value in (
            ("name", function.name),
            ("description", function.description),
            ("parameters", function.parameters),
        )
        if value is not None
    }
    return FunctionTool(
        name=function.name,
        # As transformers' `tojson` writes it in a chat template.
        definition=json.dumps({"type": "function", "function": shown}, ensure_ascii=False),
        parameters=json.dumps(schema_of_object(function.name, function.parameters, f"{param}.parameters")),
        strict=function.strict is True,
    )
