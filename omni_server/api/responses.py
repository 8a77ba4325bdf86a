"""The bodies of answers."""

from typing import Literal

from pydantic import BaseModel, Field

from omni_server.types import FinishReason


class PromptTokensDetails(BaseModel):
    text_tokens: int
    audio_tokens: int
    image_tokens: int
    video_tokens: int
    """Not among OpenAI's fields: the four counts add up to `prompt_tokens`."""
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    text_tokens: int
    audio_tokens: int
    """Codec frames that became audio."""
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class CompletionUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    """Text tokens and codec frames."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class MessageAudio(BaseModel):
    id: str
    data: str
    """Base64 of the file in the format that was asked for."""
    expires_at: int
    transcript: str


class FunctionCall(BaseModel):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class MessageToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: list[str] = []
    audio: MessageAudio | None
    tool_calls: list[MessageToolCall] | None = Field(default=None, exclude_if=lambda calls: calls is None)
    """Absent where the model has called nothing."""


class TopLogprob(BaseModel):
    token: str
    logprob: float
    """Natural logarithm; -9999 for what a constraint rules out."""
    bytes: list[int] | None
    """What the token adds to the text, in UTF-8; may end inside a character. Null for a special token."""


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[ContentLogprob]
    refusal: None = None


class Choice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: CompletionUsage


class About(BaseModel):
    """`about.json` of the checkpoint."""

    notice: str | None
    example_prompts: list[str]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "omni-server"
    root: str
    parent: None = None
    max_model_len: int
    modalities: dict[Literal["input", "output"], list[str]]
    voices: list[str]
    about: About | None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    error: ErrorBody


class DeltaAudio(BaseModel):
    id: str | None = None
    transcript: str | None = None
    data: str | None = None
    expires_at: int | None = None


class DeltaFunction(BaseModel):
    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(BaseModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: DeltaFunction


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    audio: DeltaAudio | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(BaseModel):
    """One frame of a stream. Fields that were not set are not sent: OpenAI's client adds up what it receives,
    so that most fields may be there only once."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: CompletionUsage | None = None
