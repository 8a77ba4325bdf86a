"""The body of `POST /v1/chat/completions`: types and bounds of each field.

`omni_server.api.parse` has the rules across fields and those that depend on the model.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, JsonValue, Tag

from omni_server.api.image_options import ImageOptions
from omni_server.api.validation import ExactModel, Integer, Metadata, Seed, at_most
from omni_server.audio.formats import AUDIO_FORMATS

_INT32_MAX = 2**31 - 1

Count = Annotated[Integer, Field(ge=1, le=_INT32_MAX)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[Integer, Field(ge=-1, le=_INT32_MAX, description="0 and -1 consider all tokens.")]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[Integer, Field(ge=0, le=_INT32_MAX)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=_INT32_MAX)]], Field(min_length=1, fail_fast=True)]
"""Of a prompt: so many that pydantic alone must check them."""
NonEmpty = Annotated[str, Field(min_length=1)]
BadWord = Annotated[str, Field(min_length=1, max_length=1024)]
Bias = Annotated[float, Field(ge=-100, le=100)]

MODALITIES = ("text", "audio", "image")
Modality = Annotated[str, Field(json_schema_extra={"enum": [*MODALITIES]})]
"""Checked in `omni_server.api.parse`: OpenAI's errors name the whole list, not the item."""


class TolerantModel(BaseModel):
    """Validates JSON types strictly ("1" and true are not integers) and ignores unknown keys."""

    model_config = ConfigDict(strict=True, extra="ignore")


class TypedModel(TolerantModel):
    """A member of a union; `type` tells which."""

    type: str


_TYPE_ALIASES = {"input_text": "text", "output_text": "text", "input_image": "image_url"}
_TYPES_BY_KEY = ("text", "input_audio", "image_url", "audio_url", "video_url")


def _canonical_type(declared: object) -> object:
    return _TYPE_ALIASES.get(declared, declared) if isinstance(declared, str) else declared


class TextContent(TypedModel):
    type: Annotated[
        Literal["text"],
        BeforeValidator(_canonical_type, json_schema_input_type=Literal["text", "input_text", "output_text"]),
    ] = "text"
    text: str


class RefusalContent(TypedModel):
    type: Literal["refusal"]
    refusal: str


class InputAudio(ExactModel):
    data: str
    """Base64 of an audio file; a `data:` or http(s) URL is taken as well."""
    format: (
        Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "webm", "m4a", "mp4", "pcm16", "pcm"] | None
    ) = None
    """Needed for headerless `pcm16` (24 kHz, mono, little-endian); other formats are recognised
    by their bytes."""


class InputAudioContent(TypedModel):
    type: Literal["input_audio"] = "input_audio"
    input_audio: InputAudio


class MediaUrl(TolerantModel):
    url: str


def _with_url(url: object) -> object:
    return {"url": url} if isinstance(url, str) else url


Url = Annotated[MediaUrl, BeforeValidator(_with_url, json_schema_input_type=MediaUrl | str)]


class ImageUrlContent(TypedModel):
    type: Annotated[
        Literal["image_url"],
        BeforeValidator(_canonical_type, json_schema_input_type=Literal["image_url", "input_image"]),
    ] = "image_url"
    image_url: Url


class AudioUrlContent(TypedModel):
    type: Literal["audio_url"] = "audio_url"
    audio_url: Url


class VideoUrlContent(TypedModel):
    type: Literal["video_url"] = "video_url"
    video_url: Url


MediaContent = InputAudioContent | ImageUrlContent | AudioUrlContent | VideoUrlContent


def _part_kind(part: object) -> object:
    """vLLM's users omit the type; OpenAI's Responses API has other names for some."""
    if isinstance(part, TypedModel):
        return part.type
    if not isinstance(part, dict):
        return "text"  # not an object: refused like an invalid text part
    keys = [key for key in _TYPES_BY_KEY if key in part]
    return _canonical_type(part.get("type", keys[0] if len(keys) == 1 else None))


ContentPart = Annotated[
    Annotated[TextContent, Tag("text")]
    | Annotated[RefusalContent, Tag("refusal")]
    | Annotated[InputAudioContent, Tag("input_audio")]
    | Annotated[ImageUrlContent, Tag("image_url")]
    | Annotated[AudioUrlContent, Tag("audio_url")]
    | Annotated[VideoUrlContent, Tag("video_url")],
    Discriminator(_part_kind),
]


def _content_kind(content: object) -> str | None:
    if isinstance(content, str):
        return "string"
    return "parts" if isinstance(content, list) else None


MessageContent = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True), Tag("parts")],
    Discriminator(_content_kind),
]


class CalledFunction(TolerantModel):
    name: NonEmpty
    arguments: str | None = None


class PastToolCall(TolerantModel):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class PastAudio(TolerantModel):
    """`audio` of an assistant message: an earlier answer, by id or echoed as a whole (`data` is not read)."""

    id: str
    transcript: str | None = None


_TOOL_MESSAGES_NAME_THEIR_CALL: dict[str, JsonValue] = {
    "if": {"properties": {"role": {"const": "tool"}}},
    "then": {"properties": {"tool_call_id": {"type": "string"}}, "required": ["tool_call_id"]},
}


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra=_TOOL_MESSAGES_NAME_THEIR_CALL)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageContent | None = None
    audio: PastAudio | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[PastToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None


class VoiceId(ExactModel):
    id: str


def _voice_name(voice: object) -> object:
    return voice["id"] if isinstance(voice, dict) and set(voice) == {"id"} else voice


Voice = Annotated[str, BeforeValidator(_voice_name, json_schema_input_type=str | VoiceId)]


class AudioOutput(ExactModel):
    voice: Voice | None = None
    format: Annotated[str | None, Field(examples=[*AUDIO_FORMATS, "pcm"])] = None


class StreamOptions(TolerantModel):
    include_usage: bool | None = None


class SamplingFields(BaseModel):
    """Sampling fields for both text and speech."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    max_tokens: Count | None = None
    min_tokens: TokenId | None = None
    ignore_eos: bool | None = None


class StageSampling(SamplingFields, ExactModel):
    """Sampling of the stage that samples codec tokens; unset fields keep the stage config's values."""


StageSamplings = Annotated[dict[str, StageSampling], Field(max_length=8), at_most(8)]
"""Keyed by stage name in the stage config, e.g. `talker`."""


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(TolerantModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; without it, the function takes none."""
    strict: bool | None = None
    """Hold the arguments to the schema, also where the model is free to call or not."""


class Tool(TolerantModel):
    type: Literal["function"]
    function: FunctionDefinition


class ToolName(TolerantModel):
    name: str


class NamedTool(TolerantModel):
    type: Literal["function"]
    function: ToolName


class AllowedTools(TolerantModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True)]


class AllowedToolsChoice(TolerantModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(choice: object) -> str:
    if isinstance(choice, str):
        return "word"
    is_allowed_tools = isinstance(choice, dict) and choice.get("type") == "allowed_tools"
    return "allowed_tools" if is_allowed_tools else "function"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedToolsChoice, Tag("allowed_tools")],
    Discriminator(_choice_kind),
]


class TextFormat(TolerantModel):
    type: Literal["text"]


class JsonObjectFormat(TolerantModel):
    type: Literal["json_object"]


class JsonSchema(TolerantModel):
    name: FunctionName
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """Without it, any object will do."""


class JsonSchemaFormat(TolerantModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(ExactModel):
    """vLLM's extension. One of its fields must be given."""

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[list[NonEmpty], Field(min_length=1, fail_fast=True)] | None = None
    grammar: str | None = None
    """EBNF or Lark."""
    structural_tag: str | None = None
    """xgrammar's, as JSON."""


class MmProcessorKwargs(ExactModel):
    """vLLM's extension: how media are prepared."""

    use_audio_in_video: bool | None = None
    """Hear the audio tracks of all videos with their frames. Videos without a track, or with an
    empty one, are silent; a track that is refused as an audio is refused here, too."""


def _listed(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


StopStrings = Annotated[list[NonEmpty], Field(max_length=4)]


class TextFields(SamplingFields):
    """Fields of all requests for text."""

    model_config = ConfigDict(strict=True, extra="allow", use_attribute_docstrings=True)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: (
        Annotated[StopStrings, BeforeValidator(_listed, json_schema_input_type=NonEmpty | StopStrings)] | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=127)] | None = None
    """vLLM has room for 128, among them the model's own end token."""
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024), at_most(1024)] | None = None
    """By token id."""
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=1024)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=128, fail_fast=True)] | None = None
    """vLLM takes 128, and makes tokens of each: the longer, the more than proportionally slower."""
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    metadata: Metadata | None = None
    """Not kept."""


class ChatCompletionRequest(TextFields, ImageOptions):
    """Fields that are not listed are accepted and ignored, as clients send many. Those of images are ignored
    without an image."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    modalities: Annotated[list[Modality], Field(min_length=1, fail_fast=True)] | None = None
    """`["text", "audio"]` and `["audio"]` ask for speech and its transcript. Extension: `["image"]`
    asks for an image, which is the default of a model that only generates images."""
    audio: AudioOutput | None = None
    """`voice` and `format` of the speech; required where `modalities` contain "audio", ignored elsewhere."""

    max_completion_tokens: Count | None = None
    """Most tokens of text. Speech is limited by `max_tokens` in `stage_sampling`."""
    max_tokens: Count | None = None
    """The older name; `max_completion_tokens` wins."""
    seed: Seed | None = None
    """Of the text, of the image (-1 is random), and of the speech unless `stage_sampling` has a seed for
    it."""
    stage_sampling: StageSamplings | None = None
    """Extension: sampling of the stage that samples codec tokens, by its name, as `{"talker": {...}}`. The
    fields above do not change it."""
    n: Annotated[Integer, Field(ge=1, le=128)] | None = None
    """Only 1 for an answer by voice or a stream with an image, at most 10 with an image, and at most 8 where
    messages contain audio or images."""

    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=20)] | None = None

    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    mm_processor_kwargs: MmProcessorKwargs | None = None
