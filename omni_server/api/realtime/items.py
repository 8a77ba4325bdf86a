"""The items of a conversation, as the server keeps them and as events show them.

Events contain the items themselves, without `Unsent` fields. Fields that are always null exist for clients.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from pydantic import Field, PlainValidator

from omni_server.api.realtime.audio_format import Samples
from omni_server.types import SAMPLE_RATE_HZ, ImagePart

_T = TypeVar("_T")
Unsent = Annotated[_T, PlainValidator(lambda value: value), Field(exclude=True)]

ItemStatus = Literal["in_progress", "completed", "incomplete"]

_LONGEST_WORD = 30
"""In characters. Text without spaces between words is cut anywhere."""


@dataclass
class WrittenText:
    text: str
    transcript: None = None
    type: Literal["input_text"] = "input_text"


@dataclass
class AnswerText:
    text: str
    transcript: None = None
    type: Literal["output_text"] = "output_text"


@dataclass
class HeardAudio:
    """User audio. The model reads it again in every later turn; it is never sent back."""

    samples: Unsent[Samples]
    rate_hz: Unsent[int]
    transcript: str | None = None
    text: None = None
    type: Literal["input_audio"] = "input_audio"


@dataclass
class SeenImage:
    image: Unsent[ImagePart]
    text: None = None
    transcript: None = None
    type: Literal["input_image"] = "input_image"


@dataclass
class SpokenAudio:
    """Assistant speech. The audio is not kept: later turns read its transcript."""

    transcript: str
    num_samples: Unsent[int] = 0
    """At 24 kHz, generated so far."""
    is_truncated: Unsent[bool] = False
    text: None = None
    type: Literal["output_audio"] = "output_audio"

    @property
    def audio_ms(self) -> float:
        return 1000 * self.num_samples / SAMPLE_RATE_HZ

    def truncate(self, audio_end_ms: int) -> None:
        """Cuts the transcript where the listener stopped: keeps the share of its characters that equals the
        share of the generated audio that was heard, back to the end of a word.

        The text of an answer is finished before its audio: if the answer itself was interrupted, some of its
        text has no audio yet, and slightly more text is kept than was heard.
        """
        self.is_truncated = True
        if audio_end_ms >= self.audio_ms:
            return
        kept = int(len(self.transcript) * audio_end_ms / self.audio_ms)
        if self.transcript[kept - 1 : kept + 1].strip() and not self.transcript[kept].isspace():
            word_end = max(self.transcript.rfind(space, 0, kept) for space in " \n\t")
            kept = word_end if word_end >= 0 and kept - word_end <= _LONGEST_WORD else kept
        self.transcript = self.transcript[:kept].rstrip()
        self.num_samples = round(audio_end_ms * SAMPLE_RATE_HZ / 1000)


InputContent = WrittenText | HeardAudio | SeenImage
OutputContent = AnswerText | SpokenAudio


@dataclass
class _Item:
    id: str
    status: ItemStatus = field(default="completed", kw_only=True)
    object: Literal["realtime.item"] = field(default="realtime.item", kw_only=True)


@dataclass
class SystemItem(_Item):
    content: list[WrittenText]
    role: Literal["system"] = "system"
    type: Literal["message"] = "message"


@dataclass
class UserItem(_Item):
    content: list[InputContent]
    role: Literal["user"] = "user"
    type: Literal["message"] = "message"


@dataclass
class AssistantItem(_Item):
    content: list[OutputContent]
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


@dataclass
class CallItem(_Item):
    """A function call that the assistant requests."""

    call_id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""
    type: Literal["function_call"] = "function_call"


@dataclass
class CallOutputItem(_Item):
    """The result of a function call."""

    call_id: str
    output: str
    type: Literal["function_call_output"] = "function_call_output"


Item = SystemItem | UserItem | AssistantItem | CallItem | CallOutputItem


def num_bytes(item: Item) -> int:
    """Estimates memory use."""
    match item:
        case CallItem():
            return 200 + len(item.arguments)
        case CallOutputItem():
            return 200 + len(item.output)
        case _:
            return 200 + sum(content_bytes(part) for part in item.content)


def content_bytes(part: InputContent | OutputContent) -> int:
    """Estimates memory use."""
    match part:
        case WrittenText() | AnswerText():
            return 200 + len(part.text)
        case HeardAudio():
            return 200 + part.samples.nbytes + len(part.transcript or "")
        case SeenImage(image):
            return 200 + image.pixels.nbytes
        case SpokenAudio():
            return 200 + len(part.transcript)
