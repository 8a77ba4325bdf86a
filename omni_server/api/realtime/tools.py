"""The functions of a session as what the model may call."""

import json

from omni_server.api.constraints import schema_of_object
from omni_server.api.realtime.session import FunctionDefinition, NamedFunction, SessionConfig
from omni_server.types import FunctionTool, ToolUse


def tool_use(config: SessionConfig) -> ToolUse | None:
    """None where nothing may be called: then the prompt does not show the tools either."""
    choice = config.tool_choice
    if not config.tools or choice == "none":
        return None
    tools = tuple(_function_tool(tool) for tool in config.tools)
    if isinstance(choice, NamedFunction):
        return ToolUse(tools, frozenset({choice.name}), is_required=True, is_parallel=False)
    return ToolUse(
        tools,
        frozenset(tool.name for tool in tools),
        is_required=choice == "required",
        is_parallel=config.parallel_tool_calls is not False,
    )


def _function_tool(tool: FunctionDefinition) -> FunctionTool:
    shown = tool.model_dump(include={"name", "description", "parameters"}, exclude_none=True)
    return FunctionTool(
        name=tool.name,
        # Nested, as chat templates know it.
        definition=json.dumps({"type": "function", "function": shown}, ensure_ascii=False),
        parameters=json.dumps(schema_of_object(tool.name, tool.parameters, "tools")),
    )
