"""The items of a conversation as the server keeps them."""

from dataclasses import dataclass

from omni_server.api.realtime.sample_queue import Samples
from omni_server.api.realtime.wire import ItemStatus, WireCall, WireCallOutput, WireContent, WireItem, WireMessage
from omni_server.types import SAMPLE_RATE_HZ, ImagePart


@dataclass
class WrittenText:
    text: str


@dataclass
class HeardAudio:
    """What the user said; the model hears it again in every later turn."""

    samples: Samples
    rate_hz: int
    transcript: str | None = None


@dataclass
class SeenImage:
    image: ImagePart


@dataclass
class SpokenAudio:
    """What the assistant said. The sound is not kept: later turns read its transcript."""

    transcript: str
    num_samples: int = 0
    """At 24 kHz, as it was made so far."""
    is_truncated: bool = False

    @property
    def audio_ms(self) -> float:
        return 1000 * self.num_samples / SAMPLE_RATE_HZ

    def truncate(self, audio_end_ms: int) -> None:
        """Cuts the transcript where the listener stopped hearing: at the share of its characters that the sound
        heard has of the sound made, moved back to the end of a word.

        The text of an answer is finished before its sound: where the answer itself was interrupted, some of the text
        has no sound yet, and a little more text is kept than was heard.
        """
        self.is_truncated = True
        if audio_end_ms >= self.audio_ms:
            return
        kept = int(len(self.transcript) * audio_end_ms / self.audio_ms)
        if self.transcript[kept - 1 : kept + 1].strip() and not self.transcript[kept].isspace():
            word_end = max(self.transcript.rfind(space, 0, kept) for space in " \n\t")
            # Languages that do not put spaces between words are cut where they are.
            kept = word_end if word_end >= 0 and kept - word_end <= _LONGEST_WORD else kept
        self.transcript = self.transcript[:kept].rstrip()
        self.num_samples = round(audio_end_ms * SAMPLE_RATE_HZ / 1000)


_LONGEST_WORD = 30

Content = WrittenText | HeardAudio | SeenImage | SpokenAudio


@dataclass
class SystemItem:
    id: str
    content: list[WrittenText]
    status: ItemStatus = "completed"


@dataclass
class UserItem:
    id: str
    content: list[WrittenText | HeardAudio | SeenImage]
    status: ItemStatus = "completed"


@dataclass
class AssistantItem:
    id: str
    content: list[WrittenText | SpokenAudio]
    status: ItemStatus = "completed"


@dataclass
class CallItem:
    """A function that the assistant wants to be called."""

    id: str
    call_id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""
    status: ItemStatus = "completed"


@dataclass
class CallOutputItem:
    """What a function returned."""

    id: str
    call_id: str
    output: str
    status: ItemStatus = "completed"


Message = SystemItem | UserItem | AssistantItem
Item = Message | CallItem | CallOutputItem


def wire_item(item: Item) -> WireItem:
    match item:
        case SystemItem():
            written = [WireContent(type="input_text", text=part.text) for part in item.content]
            return WireMessage(id=item.id, status=item.status, role="system", content=written)
        case UserItem():
            given = [_user_content(part) for part in item.content]
            return WireMessage(id=item.id, status=item.status, role="user", content=given)
        case AssistantItem():
            answered = [_assistant_content(part) for part in item.content]
            return WireMessage(id=item.id, status=item.status, role="assistant", content=answered)
        case CallItem():
            return WireCall(
                id=item.id, status=item.status, call_id=item.call_id, name=item.name, arguments=item.arguments
            )
        case CallOutputItem():
            return WireCallOutput(id=item.id, status=item.status, call_id=item.call_id, output=item.output)


def num_bytes(item: Item) -> int:
    """Of memory, about."""
    match item:
        case CallItem():
            return 200 + len(item.arguments)
        case CallOutputItem():
            return 200 + len(item.output)
        case _:
            return 200 + sum(content_bytes(part) for part in item.content)


def _user_content(part: WrittenText | HeardAudio | SeenImage) -> WireContent:
    match part:
        case WrittenText(text):
            return WireContent(type="input_text", text=text)
        case HeardAudio():
            return WireContent(type="input_audio", transcript=part.transcript)
        case SeenImage():
            return WireContent(type="input_image")


def _assistant_content(part: WrittenText | SpokenAudio) -> WireContent:
    match part:
        case WrittenText(text):
            return WireContent(type="output_text", text=text)
        case SpokenAudio():
            return WireContent(type="output_audio", transcript=part.transcript)


def content_bytes(part: Content) -> int:
    """As `num_bytes` counts."""
    return 200 + _data_bytes(part)


def _data_bytes(part: Content) -> int:
    match part:
        case WrittenText(text):
            return len(text)
        case HeardAudio():
            return part.samples.nbytes + len(part.transcript or "")
        case SeenImage(image):
            return image.pixels.nbytes
        case SpokenAudio():
            return len(part.transcript)
