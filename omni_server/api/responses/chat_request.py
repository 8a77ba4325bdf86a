"""Converts a request for a response to that for a chat."""

import re
from collections.abc import Sequence

from omni_server.api.parse import check_extra_fields
from omni_server.api.responses.schemas import (
    AllowedTools,
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    InputMessage,
    JsonSchemaFormat,
    NamedTool,
    Reasoning,
    ResponsesRequest,
)
from omni_server.api.schemas import (
    CalledFunction,
    ChatCompletionRequest,
    Message,
    PastToolCall,
    SamplingFields,
)
from omni_server.api.validation import validate
from omni_server.errors import InvalidRequestError

_HARMLESS_VALUES: dict[str, tuple[object, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "max_tool_calls": (None,),
}
_HINTS = {
    "background": "'background' is not supported: a response is made while its request waits.",
    "conversation": "'conversation' is not supported; use 'previous_response_id' or 'input' instead.",
}
_CHAT_NAMES = (
    (r"^tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"^response_format(\.json_schema)?", "text.format"),
    (r"^max_(completion_)?tokens$", "max_output_tokens"),
    (r"^tool_choice\.allowed_tools", "tool_choice"),
    (r"\.tool_calls\[\d+\]\.function", ""),
    (r"\.tool_call_id$", ".call_id"),
)


def chat_request(request: ResponsesRequest, messages: Sequence[Message]) -> ChatCompletionRequest:
    """Raises `InvalidRequestError` for a field that would change the answer and is not supported."""
    check_extra_fields(request.model_extra, _HARMLESS_VALUES, _HINTS)
    with_logprobs = "message.output_text.logprobs" in (request.include or ()) or bool(request.top_logprobs)
    tools = [{"type": "function", "function": tool.model_dump()} for tool in request.tools or ()]
    return validate(
        ChatCompletionRequest,
        {
            **{name: getattr(request, name) for name in SamplingFields.model_fields},
            "model": request.model,
            "messages": list(messages),
            "modalities": request.modalities or ["text"],
            "audio": request.audio,
            "stream": request.stream,
            "max_completion_tokens": request.max_output_tokens,
            "stage_sampling": request.stage_sampling,
            "logprobs": with_logprobs,
            "top_logprobs": request.top_logprobs or None,
            "tools": tools or None,
            "tool_choice": None if not tools and request.tool_choice == "auto" else _tool_choice(request),
            "parallel_tool_calls": request.parallel_tool_calls,
            "response_format": _response_format(request),
            "mm_processor_kwargs": request.mm_processor_kwargs,
        },
    )


def chat_messages(items: Sequence[InputItem]) -> tuple[list[Message], list[int]]:
    """Returns the messages, and the index of the first item of each. Calls are part of the assistant's
    message before them, as in a chat."""
    messages: list[Message] = []
    sources: list[int] = []
    for index, item in enumerate(items):
        match item:
            case FunctionCall():
                function = CalledFunction(name=item.name, arguments=item.arguments)
                call = PastToolCall(id=item.call_id, type="function", function=function)
                if messages and messages[-1].role == "assistant":
                    calls = messages[-1].tool_calls = messages[-1].tool_calls or []
                    calls.append(call)
                    continue
                messages.append(Message.model_construct(role="assistant", tool_calls=[call]))
            case FunctionCallOutput():
                messages.append(
                    Message.model_construct(role="tool", tool_call_id=item.call_id, content=item.output)
                )
            case InputMessage():
                message = Message.model_construct(role=item.role, content=item.content)
                if item.role == "assistant" and messages and messages[-1].tool_calls:
                    # In a chat, results follow the message with the calls.
                    message.tool_calls, messages[-1].tool_calls = messages[-1].tool_calls, None
                    if messages[-1].content is None:
                        messages.pop()
                        sources.pop()
                messages.append(message)
            case Reasoning():
                continue
        sources.append(index)
    return messages, sources


def with_own_names(error: InvalidRequestError, messages: Sequence[str]) -> InvalidRequestError:
    """Names the chat's field in `error` as the request has it. `messages` has a field for each message."""
    if error.param is None:
        return error
    name = re.sub(r"^messages\[(\d+)\]", lambda found: messages[int(found[1])], error.param)
    for pattern, own in _CHAT_NAMES:
        name = re.sub(pattern, own, name)
    if name == "messages" or name.startswith("input."):  # `input` is a string
        name = "input"
    error.message = error.message.replace(f"'{error.param}'", f"'{name}'")
    error.param = name
    return error


def _tool_choice(request: ResponsesRequest) -> object:
    match request.tool_choice:
        case NamedTool(name=name):
            return _named(name)
        case AllowedTools(mode=mode, tools=tools):
            allowed = {"mode": mode, "tools": [_named(tool.name) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case word:
            return word


def _named(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name}}


def _response_format(request: ResponsesRequest) -> object:
    match request.text and request.text.format:
        case JsonSchemaFormat(name=name, json_schema=schema):
            return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
        case other:
            return other
