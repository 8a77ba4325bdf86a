"""The session object: the fields that clients may set, and how updates apply."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, JsonValue, Tag

from omni_server.api.constraints import check_grammar_size, function_tool
from omni_server.api.schemas import Voice
from omni_server.api.validation import ExactModel, validate
from omni_server.api.voice_store import VoiceStore
from omni_server.api.voices import speech_output
from omni_server.errors import InvalidRequestError
from omni_server.types import ModelInfo, ToolUse

JsonObject = Mapping[str, JsonValue]

NotApplied = Annotated[None, BeforeValidator(lambda _: None)]
"""Accepted but ignored, because clients send it by habit; the session shows null, the value in effect."""
Unshown = Annotated[NotApplied, Field(exclude=True)]
"""The same, but not shown to clients: Pipecat fails on an unknown field in `transcription`."""


class PcmFormat(ExactModel):
    """16-bit, little-endian, mono."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[24000] = 24000
    rate_hz: ClassVar[int] = 24_000
    bytes_per_sample: ClassVar[int] = 2


Law = Literal["ULAW", "ALAW"]


class G711Format(ExactModel):
    """The format of telephony."""

    type: Literal["audio/pcmu", "audio/pcma"]
    rate_hz: ClassVar[int] = 8_000
    bytes_per_sample: ClassVar[int] = 1

    @property
    def law(self) -> Law:
        return "ULAW" if self.type == "audio/pcmu" else "ALAW"


WireFormat = Annotated[PcmFormat | G711Format, Field(discriminator="type")]


class ServerVad(ExactModel):
    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Field(ge=0, le=5_000)] = 300
    silence_duration_ms: Annotated[int, Field(ge=0, le=10_000)] = 500
    idle_timeout_ms: None = None
    """Refused: clients do not know its event."""
    create_response: bool = True
    interrupt_response: bool = True

    @property
    def silence_ms(self) -> int:
        return self.silence_duration_ms


class SemanticVad(ExactModel):
    """Serves clients that default to it: the same detector, with the silence set by `eagerness`."""

    type: Literal["semantic_vad"]
    threshold: ClassVar[float] = 0.5
    prefix_padding_ms: ClassVar[int] = 300
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    create_response: bool = True
    interrupt_response: bool = True

    @property
    def silence_ms(self) -> int:
        return {"low": 1200, "medium": 700, "auto": 700, "high": 400}[self.eagerness]


TurnDetection = ServerVad | SemanticVad


class Transcription(ExactModel):
    """Transcription of user audio, by the served model, whatever `model` names."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    delay: Unshown = None
    keywords: Unshown = None
    languages: Unshown = None


class InputConfig(ExactModel):
    format: WireFormat = PcmFormat()
    transcription: Transcription | None = None
    noise_reduction: NotApplied = None
    turn_detection: Annotated[TurnDetection, Field(discriminator="type")] | None = ServerVad()


class OutputConfig(ExactModel):
    format: WireFormat = PcmFormat()
    voice: Voice | None = None
    speed: Annotated[float, Field(ge=1, le=1)] = 1.0
    """The model has one speed."""


class AudioConfig(ExactModel):
    input: InputConfig = InputConfig()
    output: OutputConfig = OutputConfig()


class RetentionRatio(ExactModel):
    type: Literal["retention_ratio"]
    retention_ratio: Annotated[float, Field(ge=0, le=1)]
    token_limits: Unshown = None


def _word_or_object(value: object) -> str:
    return "object" if isinstance(value, dict | BaseModel) else "word"


Truncation = Annotated[
    Annotated[Literal["auto", "disabled"], Tag("word")] | Annotated[RetentionRatio, Tag("object")],
    Discriminator(_word_or_object),
]


class FunctionDefinition(ExactModel):
    """Flat, unlike that of chat completions."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None


class NamedFunction(ExactModel):
    type: Literal["function"]
    name: str


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[NamedFunction, Tag("object")],
    Discriminator(_word_or_object),
]

MaxOutputTokens = Annotated[int, Field(ge=1, le=4096)] | Literal["inf"]


class SessionConfig(ExactModel):
    """The part of the session that `session.update` changes."""

    type: Literal["realtime"] = "realtime"
    model: str
    output_modalities: Annotated[list[Literal["text", "audio"]], Field(min_length=1, max_length=1)]
    """One of the two: `audio` includes its transcript."""
    instructions: str = ""
    tools: Annotated[list[FunctionDefinition], Field(max_length=128)] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: Annotated[bool | None, Field(exclude_if=lambda value: value is None)] = None
    """If false, a response calls at most one function. None means true."""
    max_output_tokens: MaxOutputTokens = "inf"
    truncation: Truncation = "auto"
    tracing: NotApplied = None
    prompt: None = None
    include: NotApplied = None
    reasoning: Unshown = None
    audio: AudioConfig = AudioConfig()

    @property
    def with_speech(self) -> bool:
        return self.output_modalities == ["audio"]


def first_config(model: ModelInfo) -> SessionConfig:
    """Returns the initial settings."""
    return SessionConfig(
        model=model.name,
        output_modalities=["audio"] if model.voices else ["text"],
        audio=AudioConfig(output=OutputConfig(voice=None if model.clones_voices else model.default_voice)),
    )


_NULLABLE = frozenset({"turn_detection", "transcription", "noise_reduction", "tracing", "prompt", "include"})


def merged(base: JsonObject, changes: JsonObject) -> dict[str, JsonValue]:
    """Returns `base` with `changes` merged in. An object with another `type` replaces the old one, because
    the two types share no fields. Null changes only what can be switched off: clients send it for fields that
    they do not set."""
    result = dict(base)
    for key, value in changes.items():
        if value is None and key not in _NULLABLE:
            continue
        if isinstance(value, dict):
            old = result.get(key)
            if not isinstance(old, dict) or value.get("type", old.get("type")) != old.get("type"):
                old = {}
            result[key] = merged(old, value)
        else:
            result[key] = value
    return result


def updated(
    config: SessionConfig,
    changes: JsonObject,
    model: ModelInfo,
    voices: VoiceStore,
    *,
    param: Literal["session", "response"] = "session",
) -> SessionConfig:
    """Applies all of `changes` or none. `param` names `changes` in errors.

    Raises `InvalidRequestError` for values that are invalid or not supported by this server.
    """
    body = validate(_Body, {param: merged(config.model_dump(mode="json"), changes)})
    new = body.session or body.response
    assert new is not None
    if new.model != config.model and new.model != model.name and new.model not in model.aliases:
        raise InvalidRequestError("The model of a session cannot be changed.", param=f"{param}.model")
    if new.with_speech and not model.voices:
        raise InvalidRequestError(
            "This model answers with text only.", param=f"{param}.output_modalities", code="unsupported_value"
        )
    if model.text_stage is None and (not new.with_speech or new.tools):
        field = "tools" if new.with_speech else "output_modalities"
        raise InvalidRequestError(
            "This model only reads aloud.", param=f"{param}.{field}", code="unsupported_value"
        )
    tool_use(new, param)
    name = new.audio.output.voice
    if name is not None and name != config.audio.output.voice and model.voices:
        speech = speech_output(name, model, voices, f"{param}.audio.output.voice")
        new.audio.output.voice = speech.voice or name
    return new


class _Body(BaseModel):
    """Holds the session under the key that errors use to name its fields."""

    session: SessionConfig | None = None
    response: SessionConfig | None = None


def tool_use(config: SessionConfig, param: str = "session") -> ToolUse | None:
    """Returns the functions that the model may call, or None; then the prompt shows none either.

    Raises `InvalidRequestError`; `param` names `config` in errors.
    """
    tools = tuple(
        function_tool(tool.name, tool.description, tool.parameters, f"{param}.tools[{index}]")
        for index, tool in enumerate(config.tools)
    )
    names = frozenset(tool.name for tool in tools)
    if len(tools) > len(names):
        raise InvalidRequestError(f"Invalid '{param}.tools': a name is there twice.", param=f"{param}.tools")
    check_grammar_size(*(tool.definition for tool in tools), param=f"{param}.tools")
    choice, is_parallel = config.tool_choice, config.parallel_tool_calls is not False
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if not tools:
        raise InvalidRequestError(
            "'tool_choice' is allowed only where 'tools' are given.", param=f"{param}.tool_choice"
        )
    if isinstance(choice, NamedFunction):
        if choice.name not in names:
            raise InvalidRequestError(
                f"There is no function '{choice.name[:64]}' among the tools.", param=f"{param}.tool_choice"
            )
        names, is_parallel = frozenset({choice.name}), False
    return ToolUse(tools, names, is_required=choice != "auto", is_parallel=is_parallel)
