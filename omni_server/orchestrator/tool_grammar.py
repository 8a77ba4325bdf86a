"""Builds xgrammar structural tags for what the model may write in a turn with tools."""

import json

from omni_server.protocol.tool_calls import CALL_BEGIN, CALL_TAIL, call_head
from omni_server.types import FunctionTool, StructuredOutput, ToolUse

Format = dict[str, object]

_ANY_OBJECT = {"type": "object"}


def turn_grammar(use: ToolUse, text: StructuredOutput | None) -> StructuredOutput | None:
    """Returns None if the model may write anything. `text` constrains an answer that is not a call; of its
    kinds, only `json` can be combined with tools."""
    tools = [tool for tool in use.tools if tool.name in use.callable_names]
    if use.is_required:
        return _structural_tag(_calls(tools, use, is_strict=True))
    if text is not None:
        assert text.kind == "json"
        answer = _json(json.loads(text.value))
        alternatives: Format = {"type": "or", "elements": [_calls(tools, use, is_strict=False), answer]}
        return _structural_tag(alternatives, text.param)
    if len(tools) == len(use.tools) and not any(tool.strict for tool in tools):
        return None
    return _structural_tag(
        {
            "type": "triggered_tags",
            "triggers": [CALL_BEGIN],
            "tags": [_call(tool, is_strict=tool.strict) for tool in tools],
            "stop_after_first": not use.is_parallel,
        }
    )


def _calls(tools: list[FunctionTool], use: ToolUse, *, is_strict: bool) -> Format:
    """Allows only calls, at least one."""
    return {
        "type": "tags_with_separator",
        "tags": [_call(tool, is_strict=is_strict or tool.strict) for tool in tools],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not use.is_parallel,
    }


def _call(tool: FunctionTool, *, is_strict: bool) -> Format:
    # Always an object: `ToolParser` does not recognise calls with other arguments.
    schema = _ANY_OBJECT | json.loads(tool.parameters) if is_strict else _ANY_OBJECT
    return {"type": "tag", "begin": call_head(tool.name), "content": _json(schema), "end": CALL_TAIL}


def _json(schema: object) -> Format:
    # Without a bound, a model can write white space until its limit.
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def _structural_tag(content: Format, param: str = "tools") -> StructuredOutput:
    return StructuredOutput(
        "structural_tag", json.dumps({"type": "structural_tag", "format": content}), param
    )
