"""Events from clients: one JSON object per text frame, distinguished by its `type`.

The models are our own. Those of `openai.types.realtime` (3.54) describe what clients may send, not what a
server must refuse: every field of a message's content is optional, including `type`; lengths and numbers are
unbounded; "5" passes for 5; unknown fields are kept; and errors list what each branch of a union expected.
"""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic_core import from_json

from omni_server.api.realtime.session_config import SessionConfig
from omni_server.api.validation import MAX_JSON_MARKS, Metadata, has_too_many_values, validate
from omni_server.errors import InvalidRequestError

_PARSE_INLINE_CHARS = 64 * 1024
"""Frames up to this size are parsed in well under a millisecond; a thread would cost more."""

_MAX_PARTS = 256
"""Per message; each takes a few hundred bytes of memory, whatever it holds."""
_MAX_INPUT_ITEMS = 2000
"""A conversation's limit."""
# Only the first error is reported, so validation stops there: a frame could hold millions.
_PARTS = Field(min_length=1, max_length=_MAX_PARTS, fail_fast=True)

ItemId = Annotated[str, Field(min_length=1, max_length=128)]


class _Lenient(BaseModel):
    """Validates JSON types strictly; ignores unknown keys."""

    model_config = ConfigDict(strict=True, extra="ignore")


class InputText(_Lenient):
    type: Literal["input_text"]
    text: str


class InputAudio(_Lenient):
    type: Literal["input_audio"]
    audio: str
    """Base64, in the session's input format."""
    transcript: str | None = None


class InputImage(_Lenient):
    type: Literal["input_image"]
    image_url: str


class OutputText(_Lenient):
    type: Literal["output_text"]
    text: str


class OutputAudio(_Lenient):
    """Assistant speech; the model reads its transcript."""

    type: Literal["output_audio"]
    transcript: str


UserContent = InputText | InputAudio | InputImage


class _GivenMessage(_Lenient):
    type: Literal["message"]
    id: ItemId | None = None


class SystemMessage(_GivenMessage):
    role: Literal["system"]
    content: Annotated[list[InputText], _PARTS]


class UserMessage(_GivenMessage):
    role: Literal["user"]
    content: Annotated[list[Annotated[UserContent, Field(discriminator="type")]], _PARTS]


class AssistantMessage(_GivenMessage):
    role: Literal["assistant"]
    content: Annotated[list[Annotated[OutputText | OutputAudio, Field(discriminator="type")]], _PARTS]


class FunctionCall(_Lenient):
    type: Literal["function_call"]
    id: ItemId | None = None
    call_id: ItemId | None = None
    name: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: str


class FunctionCallOutput(_Lenient):
    type: Literal["function_call_output"]
    id: ItemId | None = None
    call_id: ItemId
    output: str


class ItemReference(_Lenient):
    """A conversation item in the `input` of a response."""

    type: Literal["item_reference"]
    id: ItemId


_Message = Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]
GivenItem = SystemMessage | UserMessage | AssistantMessage | FunctionCall | FunctionCallOutput
_InputItem = Annotated[
    _Message | FunctionCall | FunctionCallOutput | ItemReference, Field(discriminator="type")
]


class ResponseParams(BaseModel):
    """The fields that only responses have; `overrides` holds unvalidated overrides of session fields."""

    model_config = ConfigDict(strict=True, extra="allow")
    conversation: Literal["auto", "none"] | None = None
    metadata: Metadata | None = None
    input: Annotated[list[_InputItem], Field(max_length=_MAX_INPUT_ITEMS, fail_fast=True)] | None = None
    """Replaces the conversation; may be empty."""

    @property
    def overrides(self) -> dict[str, JsonValue]:
        fields = SessionConfig.model_fields.keys() - {"type", "model", "truncation"}
        return {name: value for name, value in (self.model_extra or {}).items() if name in fields}


class ClientEvent(_Lenient):
    pass


class SessionUpdate(ClientEvent):
    session: dict[str, JsonValue]


class AudioAppend(ClientEvent):
    audio: str


class AudioCommit(ClientEvent):
    pass


class AudioClear(ClientEvent):
    pass


class ItemCreate(ClientEvent):
    item: Annotated[_Message | FunctionCall | FunctionCallOutput, Field(discriminator="type")]
    previous_item_id: str | None = None


class ItemRetrieve(ClientEvent):
    item_id: str


class ItemDelete(ClientEvent):
    item_id: str


class ItemTruncate(ClientEvent):
    item_id: str
    content_index: Annotated[int, Field(ge=0)]
    audio_end_ms: Annotated[int, Field(ge=0)]


class ResponseCreate(ClientEvent):
    response: ResponseParams | None = None


class ResponseCancel(ClientEvent):
    response_id: str | None = None


_EVENTS: dict[str, type[BaseModel]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": AudioCommit,
    "input_audio_buffer.clear": AudioClear,
    "conversation.item.create": ItemCreate,
    "conversation.item.retrieve": ItemRetrieve,
    "conversation.item.delete": ItemDelete,
    "conversation.item.truncate": ItemTruncate,
    "response.create": ResponseCreate,
    "response.cancel": ResponseCancel,
}


async def read_frame(text: str) -> dict[str, JsonValue]:
    """Parses a frame as a JSON object. Raises `InvalidRequestError` with code `invalid_event`."""
    return _read(text) if len(text) <= _PARSE_INLINE_CHARS else await asyncio.to_thread(_read, text)


def parse_event(frame: dict[str, JsonValue], events: Mapping[str, type[BaseModel]] = _EVENTS) -> BaseModel:
    """`events` are the known types. Raises `InvalidRequestError`, with code `invalid_event` for an unknown
    type, else for the invalid field."""
    kind = frame.get("type")
    schema = events.get(kind) if isinstance(kind, str) else None
    if schema is None:
        shown = f"'{kind[:64]}'" if isinstance(kind, str) else "missing or no string"
        raise InvalidRequestError(
            f"Invalid 'type': {shown}. Supported events are: {', '.join(events)}.",
            param="type",
            code="invalid_event",
        )
    return validate(schema, frame)


def _read(text: str) -> dict[str, JsonValue]:
    if has_too_many_values(text):
        raise InvalidRequestError(
            "The event has more values than this server reads: "
            f"more than {MAX_JSON_MARKS} commas and brackets.",
            code="invalid_event",
        )
    try:
        frame: JsonValue = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The event is not valid JSON: {error}.", code="invalid_event") from None
    if not isinstance(frame, dict):
        raise InvalidRequestError("An event must be a JSON object.", code="invalid_event")
    return frame
