"""The body of `POST /v1/responses`: types and bounds of each field. What it shares with a chat has a chat's
types."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from omni_server.api.schemas import (
    AudioOutput,
    Count,
    FunctionDefinition,
    FunctionName,
    JsonObjectFormat,
    MessageContent,
    MmProcessorKwargs,
    NonEmpty,
    SamplingFields,
    StageSamplings,
    TextFormat,
    TolerantModel,
    TypedModel,
)
from omni_server.api.validation import Integer, Metadata


class InputMessage(TypedModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageContent


class FunctionCall(TypedModel):
    type: Literal["function_call"]
    call_id: str
    name: NonEmpty
    arguments: str


class FunctionCallOutput(TypedModel):
    type: Literal["function_call_output"]
    call_id: str
    output: MessageContent


class ItemReference(TypedModel):
    """An item of an earlier response. The server has kept it unless that had `store: false`."""

    type: Literal["item_reference"] = "item_reference"
    id: str


class Reasoning(TypedModel):
    """Not read."""

    type: Literal["reasoning"]


def _item_kind(item: object) -> object:
    if isinstance(item, TypedModel):
        return item.type
    if not isinstance(item, dict):
        return "message"  # refused as one
    is_reference = "id" in item and "role" not in item
    return item.get("type") or ("item_reference" if is_reference else "message")


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(_item_kind),
]


def _input_kind(given: object) -> str | None:
    if isinstance(given, str):
        return "string"
    return "items" if isinstance(given, list) else None


Input = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("items")],
    Discriminator(_input_kind),
]


class FunctionTool(FunctionDefinition):
    type: Literal["function"]


def _tool_kind(tool: object) -> object:
    return tool.get("type") if isinstance(tool, dict) else "function"


Tool = Annotated[Annotated[FunctionTool, Tag("function")], Discriminator(_tool_kind)]


class NamedTool(TypedModel):
    type: Literal["function"]
    name: str


class AllowedTools(TypedModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True)]


def _choice_kind(choice: object) -> object:
    if isinstance(choice, TypedModel):
        return choice.type
    return choice.get("type") if isinstance(choice, dict) else "word"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(_choice_kind),
]


class JsonSchemaFormat(TolerantModel):
    type: Literal["json_schema"]
    name: FunctionName
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextConfig(TolerantModel):
    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None
    ) = None


class ResponsesRequest(SamplingFields):
    """Fields that are not listed are accepted and ignored, as clients send many."""

    model_config = ConfigDict(strict=True, extra="allow", use_attribute_docstrings=True)

    model: str
    input: Input
    instructions: str | None = None
    """Comes before the conversation. Not taken over from the previous response."""
    previous_response_id: str | None = None
    """A response with `store: true`, whose input and output come before this input."""
    store: bool | None = None
    """Keep the response in the memory of the server, for `previous_response_id` and
    `GET /v1/responses/{response_id}`. By default and with false it is not kept; by default, its items are,
    for references to them."""
    stream: bool | None = None

    max_output_tokens: Count | None = None
    """Most tokens of text. Speech is limited by `max_tokens` in `stage_sampling`."""
    truncation: Literal["auto", "disabled"] | None = None
    """With "auto", a conversation that is too long loses its oldest messages."""
    text: TextConfig | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    """"message.output_text.logprobs" asks for log-probabilities; others are ignored."""
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None
    metadata: Metadata | None = None

    modalities: list[Literal["text", "audio"]] | None = None
    """Extension, as in chats: with "audio", the text is spoken."""
    audio: AudioOutput | None = None
    """Extension, as in chats."""
    stage_sampling: StageSamplings | None = None
    """Extension, as in chats."""
    mm_processor_kwargs: MmProcessorKwargs | None = None
    """Extension, as in chats."""


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
