"""Tools in a chat, written as the chat template of Qwen2.5's text models writes them.

The template of Qwen2.5-Omni knows no tools; its thinker is a Qwen2.5, whose tokenizer has the tags of calls
as tokens. So the tools become part of the system message, calls part of the assistant's and results part of
the user's, and the checkpoint's own template does the rest. Source: `chat_template` in tokenizer_config.json
of Qwen/Qwen2.5-7B-Instruct.
"""

import json
from collections.abc import Callable, Sequence
from itertools import groupby

from omni_server.protocol.tool_calls import CALL_BEGIN, CALL_END, CALL_TAIL, call_head
from omni_server.types import ChatMessage, ContentPart, FunctionTool, TextPart, ToolCall

_SYSTEM_PROMPT = "You are a helpful assistant."
"""What the checkpoint's template inserts where there is no system message."""

_TOOLS = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{definitions}
</tools>

For each function call, return a json object with function name and arguments within {begin}{end} XML tags:
{begin}
{{"name": <function-name>, "arguments": <args-json-object>}}
{end}"""


def with_tools(
    messages: Sequence[ChatMessage], tools: Sequence[FunctionTool], marked: Callable[[str], str]
) -> tuple[ChatMessage, ...]:
    """The same chat without calls and without the role "tool"; with the tools in its first message, if there
    are any.

    The result has one message for all results that follow each other. `marked` is applied to what the caller
    has written of calls and tools: the tags around them are tokens.
    """
    written: list[ChatMessage] = []
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            written.append(ChatMessage("user", _results(list(group))))
        else:
            written += [_without_calls(message, marked) for message in group]
    return tuple(
        _with_system_tools(written, [marked(tool.definition) for tool in tools]) if tools else written
    )


def _with_system_tools(messages: list[ChatMessage], tools: Sequence[str]) -> list[ChatMessage]:
    definitions = "\n".join(tools)
    text = TextPart(_TOOLS.format(definitions=definitions, begin=CALL_BEGIN, end=CALL_END))
    if messages and messages[0].role == "system":
        return [ChatMessage("system", (*messages[0].content, text)), *messages[1:]]
    return [ChatMessage("system", (TextPart(_SYSTEM_PROMPT), text)), *messages]


def _without_calls(message: ChatMessage, marked: Callable[[str], str]) -> ChatMessage:
    if not message.tool_calls:
        return message
    calls = "\n".join(_call(call, marked) for call in message.tool_calls)
    has_text = any(not isinstance(part, TextPart) or part.text for part in message.content)
    return ChatMessage(message.role, (*message.content, TextPart("\n" + calls if has_text else calls)))


def _call(call: ToolCall, marked: Callable[[str], str]) -> str:
    """Arguments in the layout that the model is trained on; as they are where they are no JSON, are nested
    too deeply or have an escape that stands for no character."""
    try:
        arguments = json.dumps(json.loads(call.arguments or "{}"), ensure_ascii=False)
        arguments.encode()
    except (ValueError, RecursionError):
        arguments = call.arguments
    return call_head(marked(call.name)) + marked(arguments) + CALL_TAIL


def _results(messages: list[ChatMessage]) -> tuple[ContentPart, ...]:
    parts: list[ContentPart] = []
    for position, message in enumerate(messages):
        parts.append(TextPart(("\n" if position else "") + "<tool_response>\n"))
        parts += message.content
        parts.append(TextPart("\n</tool_response>"))
    return tuple(parts)
