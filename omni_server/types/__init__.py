"""The requests that enter the server and the events that leave it. No I/O, no torch, no vLLM."""

import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

from omni_server.types.images import (
    ImageDone,
    ImageFeatures,
    ImageOutput,
    ImageProgress,
    ImageSize,
    PartialImage,
)

Role = Literal["system", "user", "assistant", "tool"]
MediaKind = Literal["audio", "image", "video"]
FinishReason = Literal["stop", "length", "tool_calls"]
Output = Literal["text", "audio", "image", "voice"]
"""What a model can generate. A voice is made of a recording, for later requests."""

SAMPLE_RATE_HZ = 24_000
"""Sample rate of every output waveform; OpenAI's `pcm16` is defined at this rate."""


@dataclass(frozen=True)
class TextPart:
    text: str


@dataclass(frozen=True)
class AudioPart:
    """A mono waveform, float32. Full scale is [-1, 1], which resampling may exceed."""

    kind: ClassVar[MediaKind] = "audio"
    samples: npt.NDArray[np.float32]  # [num_samples]
    sample_rate_hz: int


@dataclass(frozen=True)
class ImagePart:
    """An RGB image, uint8."""

    kind: ClassVar[MediaKind] = "image"
    pixels: npt.NDArray[np.uint8]  # [height, width, 3]


@dataclass(frozen=True)
class VideoPart:
    """RGB frames sampled from a video at `fps` frames per second, uint8."""

    kind: ClassVar[MediaKind] = "video"
    frames: npt.NDArray[np.uint8]  # [num_frames, height, width, 3]
    fps: float
    audio: AudioPart | None = None
    """The video's audio track, which is heard with the frames; None if it has none or is not listened to."""


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
    """Arguments must follow the schema, even if the call itself is optional."""


@dataclass(frozen=True)
class ToolUse:
    tools: tuple[FunctionTool, ...]
    """All tools in the prompt."""
    callable_names: frozenset[str]
    """The tools that may be called in this turn."""
    is_required: bool = False
    """The answer must be a call."""
    is_parallel: bool = True
    """Allows several calls."""


StructuredOutputKind = Literal["json", "regex", "choice", "grammar", "structural_tag"]


@dataclass(frozen=True)
class StructuredOutput:
    """A constraint on the text."""

    kind: StructuredOutputKind
    value: str
    """`json`: the schema, as JSON. `choice`: a JSON array of strings. `structural_tag`: xgrammar's, as
    JSON."""
    param: str
    """The request's field that sets it, for errors."""


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling of one autoregressive stage. `None` falls back to the next level: request, then stage config,
    then the engine's own default."""

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
    """Report the log-probability of each sampled token and this many of the likeliest; may be 0."""


@dataclass(frozen=True)
class ClonedVoice:
    """A voice that a model speaks with, made of a recording by the model's encoders."""

    vector: bytes
    """float32, as wide as the rows of the model."""
    frames: bytes = b""
    """Codec frames of the recording, int16 `[num_frames, codebooks]`; only with `text`."""
    text: str = ""
    """What is said in the recording."""


class Flush(Enum):
    """Among the pieces of a text: what has come so far is spoken without waiting for the end of its last
    word. Other tokens may spell a word that is flushed before it is complete."""

    FLUSH = "flush"


@dataclass(frozen=True)
class SpeechOutput:
    """Present in a request for a spoken answer."""

    voice: str | None = None
    """A name in `ModelInfo.voices`; None selects the model's default voice."""
    seed: int | None = None
    """Seed of the waveform's noise; None draws one."""
    text: str | None = None
    """Text to speak, word for word, as the answer to the messages. The model generates no text, so its
    sampling has no effect. None speaks the model's text."""
    language: str | None = None
    """Name of the language, or its ISO 639-1 code, in any case; None and "auto" leave it to the model."""
    instructions: str | None = None
    """How to speak, or a description of the voice."""
    pieces: AsyncIterator[str | Flush] | None = None
    """In place of `text`, for models that read: the text, spoken while it is written."""
    is_aligned: bool = False
    """For models that read: report `TextAlignment`."""
    text_first: bool | None = None
    """For models that read: the prompt has all of the text, instead of a token for each frame of speech. By
    default, `pieces` are spoken as they come, and a text that is given as the model's reference does it."""
    clone: ClonedVoice | None = None
    """For models that clone voices."""
    must_end: bool = False
    """Speech that reaches its limit of tokens is an `EndlessSpeechError`, instead of an incomplete answer."""


@dataclass(frozen=True)
class ReadAloud:
    """The task to speak `text` in the manner that `instructions` describe."""

    text: str
    instructions: str | None = None


@dataclass(frozen=True)
class Transcribe:
    """The task to transcribe the speech in `audio`, in its own language or translated to English."""

    audio: AudioPart
    to_english: bool = False
    language: str | None = None
    """ISO 639-1 code of the spoken language, if known."""
    hint: str | None = None
    """Words that may occur, or preceding text: OpenAI's `prompt`."""


Task = ReadAloud | Transcribe


@dataclass(frozen=True)
class Prompt:
    """A rendered chat with its media, in order of appearance, or a text as it is."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    """Instead of `text`."""
    add_special_tokens: bool = True
    """Add those that the tokenizer puts around text, such as one at its begin."""
    audios: tuple[tuple[npt.NDArray[np.float32], int], ...] = ()  # samples [n], rate in Hz
    images: tuple[npt.NDArray[np.uint8], ...] = ()  # each [height, width, 3]
    videos: tuple[VideoPart, ...] = ()
    """An audio track that is heard is here, and not in `audios`."""
    processor_kwargs: Mapping[str, object] = field(default_factory=dict)
    pieces: tuple[str, ...] = ()
    """`text`, split inside every string that merely spells a special token, so that tokenising each piece
    separately yields no special token. Empty if no split is needed."""


@dataclass(frozen=True)
class TokenizedPrompt:
    token_ids: tuple[int, ...]
    strings: tuple[str, ...]
    """The tokens as the vocabulary writes them."""
    text: str
    """With special tokens."""


@dataclass(frozen=True)
class OmniRequest:
    """One chat turn to answer. `sampling` is keyed by stage name."""

    request_id: str
    messages: tuple[ChatMessage, ...]
    speech: SpeechOutput | None = None
    sampling: Mapping[str, SamplingConfig] = field(default_factory=dict)
    deadline_s: float | None = None
    """Seconds from `began_at` until the request fails; None uses the server's `--request-timeout`."""
    began_at: float | None = None
    """`time.monotonic()` at which the request began, for related requests that are submitted one after the
    other; None uses the time of submission."""
    is_sibling_choice: bool = False
    """Another choice for a prompt that was already submitted."""
    caller: str = ""
    """Under load, callers take turns: one with few requests does not wait for all those of another."""
    is_logged: bool = True
    """Log a line with all its times at level DEBUG when it completes."""
    tools: ToolUse | None = None
    """With speech, only the text before the first call is spoken."""
    structured_output: StructuredOutput | None = None
    prompt: Prompt | None = None
    """Without media, to be continued with text. Instead of `messages`, which are empty."""
    image: ImageOutput | None = None
    can_be_shortened: bool = False
    """The caller can retry with a shorter prompt, so one that leaves less room than the default
    `max_tokens` is refused: `context_length_exceeded`. Otherwise the answer gets the remaining room."""
    max_tokens_param: str = "max_completion_tokens"
    """The request's field that limits the text, for errors."""

    @property
    def num_chars(self) -> int:
        """Of the chat, or of the given prompt, whose token ids count as one each."""
        if self.prompt is not None:
            return len(self.prompt.text or self.prompt.token_ids)
        parts = [part for message in self.messages for part in message.content]
        calls = [call for message in self.messages for call in message.tool_calls]
        texts = sum(len(part.text) for part in parts if isinstance(part, TextPart))
        return texts + sum(len(call.arguments) for call in calls)


@dataclass(frozen=True)
class PromptTokens:
    """Prompt tokens by kind; `text` includes those of the chat template."""

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
    """Tokens of the text including the end token, or of `SpeechOutput.text`."""
    codec_tokens: int
    """Codec frames that became audio; 0 without speech."""
    image_tokens: int = 0
    """Squares of 16 x 16 pixels of the image; 0 without one."""


@dataclass(frozen=True)
class TokenLogprob:
    text: str
    utf8: bytes
    """The text that the token adds; empty for a special token. May end inside a character."""
    logprob: float
    """Natural logarithm, under the model's own distribution; -inf for tokens that a constraint excludes."""


@dataclass(frozen=True)
class SampledToken:
    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """The likeliest tokens, likeliest first."""


@dataclass(frozen=True)
class TextDelta:
    """New text. `text` may be empty while a character is incomplete or inside a tool call."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[SampledToken, ...] = ()
    """For the tokens whose text is complete, except the end token; only if requested."""


@dataclass(frozen=True)
class ToolCallDelta:
    """The next piece of a tool call. Calls do not interleave."""

    index: int
    call_id: str | None
    """Like `name`, only in the first piece of a call."""
    name: str | None
    arguments: str
    """The pieces join to the arguments as the model wrote them: JSON, unless it erred or was cut off."""


@dataclass(frozen=True)
class CodecDelta:
    """New frames of codec tokens, concatenated, without the stop token. They arrive in blocks."""

    codes: tuple[int, ...]


@dataclass(frozen=True)
class AudioDelta:
    """The next piece of the waveform; pieces are contiguous and in order."""

    first_sample: int
    samples: npt.NDArray[np.float32]  # [num_samples], 24 kHz mono, in [-1, 1]


@dataclass(frozen=True)
class TextAlignment:
    """The next piece of a text that is spoken, as its normal form writes it (NFC), and when the model was
    given it. Precedes the audio."""

    text: str
    end_sample: int
    """Where the audio of the frame ends with which the model was given the text, at 24 kHz."""


@dataclass(frozen=True)
class WindowTimes:
    """Times of one window of codec tokens, in seconds since the request began."""

    ready_s: float
    """All its codec tokens arrived."""
    sent_s: float
    computed_s: float
    """Its audio arrived."""


@dataclass(frozen=True)
class StageTimes:
    """Times of one stage for a request, in seconds since the request began."""

    submitted_s: float
    """The stage received the request: with the prompt's embeddings if it receives embeddings; for a decoder,
    when all codec tokens of its first window had arrived."""
    first_output_s: float | None = None
    """None for a stage without output. Tokens may arrive in blocks. Audio counts when it is sent to the
    caller."""
    last_output_s: float | None = None
    windows: tuple[WindowTimes, ...] = ()
    """Only for the codec decoder."""
    replica: int | None = None
    """Which replica of the stage it was; None if the stage has one."""


@dataclass(frozen=True)
class Finished:
    """The last event of every successful request. A failure raises `OmniError` instead."""

    finish_reason: FinishReason
    """`tool_calls` if it ended by itself and has a call."""
    usage: Usage
    times: Mapping[str, StageTimes] = field(default_factory=dict)
    """By stage name, in the order in which the stages received the request. Stages that it did not need are
    absent."""


OmniEvent = (
    TextDelta
    | ToolCallDelta
    | CodecDelta
    | AudioDelta
    | TextAlignment
    | ImageProgress
    | PartialImage
    | ImageDone
    | Finished
)


ExamplePrompt = Annotated[str, Field(min_length=1, max_length=300, pattern=r"\S")]


@dataclass(frozen=True)
class AboutModel:
    """The checkpoint's `about.json`, for example `{"notice": "This model knows a few sentences only.",
    "example_prompts": ["What are you?"], "longest_passage": 100}`."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    notice: Annotated[str, Field(min_length=1, max_length=600, pattern=r"\S")] | None = None
    """One or two plain sentences for a banner."""
    example_prompts: Annotated[tuple[ExamplePrompt, ...], Field(max_length=8)] = ()
    """Questions that the model can answer; empty if the checkpoint lists none."""
    longest_passage: Annotated[int, Field(ge=1)] | None = None
    """Letters that the model can read per request if it spells all words; None if it sets no limit."""
    understands_speech: bool = True
    """False: the page says so and transcribes nothing."""


@dataclass(frozen=True)
class ModelInfo:
    """What the API reports about the model."""

    name: str
    """First served name; what responses report as `model`."""
    aliases: tuple[str, ...]
    """Other names that requests may use."""
    voices: tuple[str, ...]
    """Empty if the deployment does not speak; requests for speech are then refused."""
    default_voice: str | None
    outputs: frozenset[Output]
    """What it generates."""
    text_stage: str | None
    """Name of the stage that generates the text, or None."""
    speech_stage: str | None
    """Name of the stage that samples the codec tokens; None without speech."""
    max_model_len: int
    input_modalities: tuple[MediaKind, ...]
    max_media_per_prompt: Mapping[MediaKind, int]
    created: int
    """Unix time of the server's start."""
    fingerprint: str
    """Changes with the server's version, the checkpoint's config and the stage config."""
    about: AboutModel | None = None
    """None without an `about.json`."""
    longest_speech_s: float = math.inf
    """Longest speech per request, if the request sets no limit."""
    image_sizes: tuple[ImageSize, ...] = ()
    """Sizes of the images it generates, the default first; empty without images."""
    image_features: ImageFeatures = field(default_factory=ImageFeatures)
    hears_videos: bool = False
    """Whether it can hear the audio track of a video with its frames."""
    reads_text: bool = False
    """Whether it can speak a text while it is written (`SpeechOutput.pieces`)."""

    @property
    def clones_voices(self) -> bool:
        return "voice" in self.outputs

    @property
    def only_generates_images(self) -> bool:
        return self.outputs == {"image"}
