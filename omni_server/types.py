"""What goes into the server and what comes out of it: requests and events. No I/O, no torch, no vLLM."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

Role = Literal["system", "user", "assistant", "tool"]
MediaKind = Literal["audio", "image", "video"]
FinishReason = Literal["stop", "length", "tool_calls"]
Output = Literal["text", "audio", "image"]
"""What a model can answer with, and the API can send."""

SAMPLE_RATE_HZ = 24_000
"""Rate of every waveform that leaves the server; OpenAI's `pcm16` is defined at this rate."""


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class AudioPart:
    """A mono waveform, float32 in [-1, 1]."""

    samples: npt.NDArray[np.float32]  # [num_samples]
    sample_rate_hz: int


@dataclass(frozen=True)
class ImagePart:
    """An RGB image, uint8."""

    pixels: npt.NDArray[np.uint8]  # [height, width, 3]


@dataclass(frozen=True)
class VideoPart:
    """RGB frames sampled from a video at `fps` frames per second, uint8."""

    frames: npt.NDArray[np.uint8]  # [num_frames, height, width, 3]
    fps: float


ContentPart = TextPart | AudioPart | ImagePart | VideoPart


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made in an earlier turn."""

    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(frozen=True)
class ChatMessage:
    role: Role
    content: tuple[ContentPart, ...]
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class FunctionTool:
    """A function that the model may call."""

    name: str
    definition: str
    """JSON, as the prompt shows it: `{"type": "function", "function": {...}}`."""
    parameters: str
    """JSON schema of the arguments."""
    strict: bool = False
    """Arguments must follow the schema, also where the model is free to call or not."""


@dataclass(frozen=True)
class ToolUse:
    tools: tuple[FunctionTool, ...]
    """All that the prompt shows."""
    callable_names: frozenset[str]
    """Those among them that may be called in this turn."""
    is_required: bool = False
    """The answer must be a call."""
    is_parallel: bool = True
    """It may be several calls."""


StructuredOutputKind = Literal["json", "regex", "choice", "grammar", "structural_tag"]


@dataclass(frozen=True)
class StructuredOutput:
    """What the text must look like."""

    kind: StructuredOutputKind
    value: str
    """`json`: the schema, as JSON. `choice`: a JSON array of strings. `structural_tag`: xgrammar's, as
    JSON."""
    param: str
    """The request's field that asked for it, for errors."""


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling of one autoregressive stage. `None` means: the value of the stage below this one in
    precedence (request over stage config over the engine's own default)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits, by token id."""
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    logprobs: int | None = None
    """Report the log-probability of each sampled token, and of this many of the likeliest; may be 0."""


@dataclass(frozen=True)
class SpeechOutput:
    """Present in a request that wants to be answered by voice."""

    voice: str | None = None
    """A name out of `ModelInfo.voices`; None is the model's default voice."""
    seed: int | None = None
    """Seed of the waveform's noise; None draws one."""
    text: str | None = None
    """What is spoken, word for word, as the answer to the messages. The model reads it and writes nothing: its
    sampling does not count. None speaks what the model writes."""


@dataclass(frozen=True)
class ImageSize:
    """In pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        """As OpenAI writes it, `1024x1536`."""
        return f"{self.width}x{self.height}"


@dataclass(frozen=True)
class ImageOutput:
    """Present in a request that wants to be answered with an image."""

    size: ImageSize | None = None
    """One of `ModelInfo.image_sizes`; None is the first of them."""
    seed: int | None = None
    """Seed of the noise, 0 to 2**63 - 1; None draws one."""


@dataclass(frozen=True)
class ReadAloud:
    """The task to speak `text`, in the manner that `instructions` describe."""

    text: str
    instructions: str | None = None


@dataclass(frozen=True)
class Transcribe:
    """The task to transcribe what is said in `audio`: in its own language, or translated to English."""

    audio: AudioPart
    to_english: bool = False
    language: str | None = None
    """ISO 639-1 code of the language that is spoken, if it is known."""
    hint: str | None = None
    """Words that may occur, or the text before: OpenAI's `prompt`."""


Task = ReadAloud | Transcribe


@dataclass(frozen=True)
class OmniRequest:
    """One chat turn to answer. `sampling` is keyed by the names of stages."""

    request_id: str
    messages: tuple[ChatMessage, ...]
    speech: SpeechOutput | None = None
    sampling: Mapping[str, SamplingConfig] = field(default_factory=dict)
    deadline_s: float | None = None
    """Seconds from `began_at` until the request fails; None is the server's `--request-timeout`."""
    began_at: float | None = None
    """`time.monotonic()` when the request began, for those that are submitted one after the other but belong
    together; None is when it is submitted."""
    is_another_choice: bool = False
    """Of a prompt that another request has brought already."""
    is_logged: bool = True
    """At level DEBUG, the log gets a line with all its times when it has been answered."""
    tools: ToolUse | None = None
    """With speech: only what the answer says before its first call is spoken."""
    structured_output: StructuredOutput | None = None
    image: ImageOutput | None = None
    can_be_shortened: bool = False
    """The caller has a shorter prompt to try: one that leaves less room than the default `max_tokens`
    is refused with `context_length_exceeded`. Without it the answer gets the room that is left."""


@dataclass(frozen=True)
class PromptTokens:
    """How many tokens of the prompt stand for what; `text` includes the chat template's own."""

    total: int
    text: int
    audio: int
    image: int
    video: int
    cached: int = 0


@dataclass(frozen=True)
class Usage:
    prompt: PromptTokens
    text_tokens: int
    """Tokens of the text, the end token included; or those of `SpeechOutput.text`."""
    codec_tokens: int
    """Codec frames that became audio; 0 without speech."""


@dataclass(frozen=True)
class TokenLogprob:
    text: str
    utf8: bytes
    """What the token adds to the text; empty for a special token. May end inside a character."""
    logprob: float
    """Natural logarithm, of the model's own distribution; -inf for a token that a constraint rules out."""


@dataclass(frozen=True)
class SampledToken:
    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """The likeliest ones, most likely first."""


@dataclass(frozen=True)
class TextDelta:
    """New text. `text` may be empty: while a character is incomplete, or inside a tool
    call."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[SampledToken, ...] = ()
    """Of the tokens whose text has come by now, the end token excluded; only where they were asked for."""


@dataclass(frozen=True)
class ToolCallDelta:
    """The next piece of a tool call. Calls come one after the other."""

    index: int
    call_id: str | None
    """With the first piece of a call only, as is `name`."""
    name: str | None
    arguments: str
    """Joined, they are the arguments as the model wrote them: JSON, unless the model is wrong or was cut."""


@dataclass(frozen=True)
class CodecDelta:
    """New frames of codec tokens, one behind the other, the stop token excluded. They come in blocks."""

    codes: tuple[int, ...]


@dataclass(frozen=True)
class AudioDelta:
    """The next piece of the waveform; pieces are contiguous and in order."""

    first_sample: int
    samples: npt.NDArray[np.float32]  # [num_samples], 24 kHz mono, in [-1, 1]


@dataclass(frozen=True)
class ImageDone:
    pixels: npt.NDArray[np.uint8]  # [height, width, 3], RGB


@dataclass(frozen=True)
class TextDone:
    """The text is complete; no TextDelta follows."""

    finish_reason: FinishReason


@dataclass(frozen=True)
class WindowTimes:
    """One window of codec tokens, in seconds since the request was started."""

    ready_s: float
    """All of its codec tokens had arrived."""
    sent_s: float
    computed_s: float
    """Its audio came back."""


@dataclass(frozen=True)
class StageTimes:
    """What one stage did for a request, in seconds since the request was started."""

    submitted_s: float
    """The stage was given the request: a stage that gets embeddings, with those of the prompt; a decoder, when
    the codec tokens of its first window had arrived."""
    first_output_s: float | None = None
    """None for a stage without output. Tokens may come in blocks. Audio counts when it leaves for the
    caller."""
    last_output_s: float | None = None
    windows: tuple[WindowTimes, ...] = ()
    """Of the stage that gets the codec tokens."""


@dataclass(frozen=True)
class Finished:
    """Always the last event of a request that did not fail. A failure raises `OmniError` instead."""

    finish_reason: FinishReason
    """`tool_calls` where the answer ended by itself and holds one."""
    usage: Usage
    times: Mapping[str, StageTimes] = field(default_factory=dict)
    """By the name of the stage, those first that were given the request first. Stages that the request did not
    need are absent."""


OmniEvent = TextDelta | ToolCallDelta | CodecDelta | AudioDelta | ImageDone | TextDone | Finished


ExamplePrompt = Annotated[str, Field(min_length=1, max_length=300, pattern=r"\S")]


@dataclass(frozen=True)
class AboutModel:
    """What the makers of the checkpoint say about it in `about.json`, for example `{"notice": "This model knows a
    few sentences only.", "example_prompts": ["What are you?"], "longest_passage": 100}`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    notice: Annotated[str, Field(min_length=1, max_length=600, pattern=r"\S")] | None = None
    """One or two plain sentences for a banner."""
    example_prompts: Annotated[tuple[ExamplePrompt, ...], Field(max_length=8)] = ()
    """Questions that the model can answer; empty where the checkpoint names none."""
    longest_passage: Annotated[int, Field(ge=1)] | None = None
    """Letters that the model can read aloud in one utterance, if it spells all words; None for no limit of
    its own."""


@dataclass(frozen=True)
class ModelInfo:
    """What the API tells about the served model."""

    name: str
    """First served name; what responses report as `model`."""
    aliases: tuple[str, ...]
    """Further names that requests may use."""
    voices: tuple[str, ...]
    """Empty if the deployment does not speak: requests for speech are refused then."""
    default_voice: str | None
    outputs: frozenset[Output]
    """What it answers with."""
    text_stage: str | None
    """Name of the stage that writes the text; None where none does."""
    speech_stage: str | None
    """Name of the stage that samples the codec tokens; None without speech."""
    max_model_len: int
    input_modalities: tuple[MediaKind, ...]
    max_media_per_prompt: Mapping[MediaKind, int]
    created: int
    """Unix time of the server's start."""
    fingerprint: str
    """Differs where the server's version, the checkpoint's config or the stage config do."""
    about: AboutModel | None = None
    """None where the checkpoint says nothing."""
    longest_speech_s: float = math.inf
    """What the model says in one request at most, where a request sets no limit."""
    image_sizes: tuple[ImageSize, ...] = ()
    """Of the images that it makes, the default first; empty where it makes none."""
