"""Renders text, audio and images as OpenAI's response bodies and stream frames."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from openai.types.chat import (
    ChatCompletionAudio,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionTokenLogprob,
)
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import (
    ChoiceDeltaAudio,
    ChoiceDeltaToolCall,
    ChoiceDeltaToolCallFunction,
)
from openai.types.chat.chat_completion_message_function_tool_call import Function
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from pydantic import BaseModel, Field

from omni_server.api.image_options import ImageOptions
from omni_server.api.images.files import data_url
from omni_server.api.streaming import DONE, FrameTemplate, frame
from omni_server.api.usage import CompletionUsage, completion_usage, total_usage
from omni_server.audio.base64_stream import Base64Stream
from omni_server.audio.formats import AudioFormat
from omni_server.types import (
    AudioDelta,
    Finished,
    FinishReason,
    OmniEvent,
    SampledToken,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from omni_server.types.images import ImageDone

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity. OpenAI's documentation names this value for a very unlikely token, and
vLLM sends it."""


class ImageUrl(BaseModel):
    url: str
    """A `data:` URL."""


class MessageImage(BaseModel):
    """An extension, as OpenRouter and vLLM-Omni have it."""

    type: Literal["image_url"]
    index: int
    """By which OpenAI's client puts the images of a stream together."""
    image_url: ImageUrl


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: list[str] = []
    audio: ChatCompletionAudio | None
    tool_calls: list[ChatCompletionMessageFunctionToolCall] | None = Field(
        default=None, exclude_if=lambda calls: calls is None
    )
    """Absent if the model called no tools."""
    images: list[MessageImage] | None = Field(default=None, exclude_if=lambda images: images is None)
    """Absent unless `modalities` ask for an image."""


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


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    audio: ChoiceDeltaAudio | None = None
    tool_calls: list[ChoiceDeltaToolCall] | None = None
    images: list[MessageImage] | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(BaseModel):
    """One frame of a stream. Unset fields are not sent: OpenAI's client accumulates the fields it receives,
    so most of them may appear only once."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: CompletionUsage | None = None


@dataclass(frozen=True)
class Answer:
    """The data common to all parts of an answer."""

    id: str
    created: int
    model: str
    fingerprint: str
    audio_format: AudioFormat | None
    audio_id: str | None
    """Both None if the answer is text only."""
    text_in_content: bool
    """The transcript is also in `content`."""
    image: ImageOptions | None
    """None unless the answer is an image."""
    include_usage: bool
    """The last chunk of a stream has the `usage`, all others have null."""
    call_finish_reason: FinishReason
    """Finish reason of an answer that calls tools: "stop" if the request named the function, as OpenAI
    does."""

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        return self.call_finish_reason if reason == "tool_calls" else reason

    def ending(self, usage: Usage) -> Iterator[bytes]:
        """The frames that end a stream, after all choices."""
        if self.include_usage:
            yield frame(self.chunk([], completion_usage(usage)))
        yield DONE

    def chunk(self, choices: list[ChunkChoice], usage: CompletionUsage | None = None) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
        )
        if self.include_usage:
            chunk.usage = usage
        return chunk


def choice_logprobs(tokens: Sequence[SampledToken]) -> ChoiceLogprobs:
    return ChoiceLogprobs(
        content=[
            ChatCompletionTokenLogprob(
                **_logprob(token.sampled).model_dump(), top_logprobs=list(map(_logprob, token.top))
            )
            for token in tokens
        ],
        refusal=None,
    )


class CollectedChoice:
    """Collects the events of one choice of an answer that is not streamed."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self._text: list[str] = []
        self._audio: list[npt.NDArray[np.float32]] = [np.zeros(0, dtype=np.float32)]
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments
        self._images: list[ImageDone] = []
        self.logprobs: list[SampledToken] | None = [] if with_logprobs else None
        self._finished: Finished | None = None

    def take(self, event: OmniEvent) -> None:
        match event:
            case TextDelta():
                self._text.append(event.text)
                if self.logprobs is not None:
                    self.logprobs += event.logprobs
            case ToolCallDelta(call_id=call_id, name=name):
                if call_id is not None and name is not None:
                    self._calls.append((call_id, name, []))
                self._calls[event.index][2].append(event.arguments)
            case AudioDelta():
                self._audio.append(event.samples)
            case ImageDone():
                self._images.append(event)
            case Finished():
                self._finished = event

    @property
    def finished(self) -> Finished:
        assert self._finished is not None
        return self._finished

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def is_call(self) -> bool:
        """Whether the model only called tools."""
        return bool(self._calls) and not self.text

    def samples(self) -> npt.NDArray[np.float32]:
        """All audio, float32 [n]."""
        return np.concatenate(self._audio)

    def rendered(self, index: int, answer: Answer, audio: ChatCompletionAudio | None) -> Choice:
        is_spoken_only = audio is not None and not answer.text_in_content
        calls = [
            ChatCompletionMessageFunctionToolCall(
                id=call_id, type="function", function=Function(name=name, arguments="".join(pieces))
            )
            for call_id, name, pieces in self._calls
        ]
        images: list[MessageImage] | None = None
        if answer.image is not None:
            images = [_message_image(data_url(image.pixels, answer.image)) for image in self._images]
        is_without_text = is_spoken_only or self.is_call or answer.image is not None
        return Choice(
            index=index,
            message=AssistantMessage(
                content=None if is_without_text else self.text,
                audio=audio,
                tool_calls=calls or None,
                images=images,
            ),
            logprobs=None if self.logprobs is None else choice_logprobs(self.logprobs),
            finish_reason=answer.finish_reason(self.finished.finish_reason),
        )


def render_completion(
    answer: Answer, choices: Sequence[CollectedChoice], audio_file: bytes | None = None, expires_at: int = 0
) -> bytes:
    """The body of an answer that is not streamed. With `audio_file` or an
    image, which are large, call it in a thread."""
    audio = None
    if audio_file is not None:
        assert answer.audio_id is not None
        data = base64.b64encode(audio_file).decode("ascii")
        audio = ChatCompletionAudio(
            id=answer.audio_id, data=data, expires_at=expires_at, transcript=choices[0].text
        )
    completion = ChatCompletion(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        system_fingerprint=answer.fingerprint,
        choices=[choice.rendered(index, answer, audio) for index, choice in enumerate(choices)],
        usage=completion_usage(total_usage([choice.finished.usage for choice in choices])),
    )
    return completion.model_dump_json().encode()


class ChoiceRenderer:
    """Renders the frames of one choice of a streamed answer.

    OpenAI's client builds the message by concatenating strings and adding numbers, so the role, the audio's
    id and expiry, and each call's id and name are sent exactly once.
    """

    def __init__(self, answer: Answer, index: int, *, may_call: bool) -> None:
        """With `may_call`, the audio's id is sent with the first text: a call has no audio."""
        self._answer = answer
        self._index = index
        self._has_audio = self._answer.audio_id is not None
        self._is_audio_open = self._has_audio and not may_call  # the client knows the audio's id
        self._has_calls = False
        self._base64 = Base64Stream()
        self._text_frames: FrameTemplate | None = None
        if not (self._has_audio and self._answer.text_in_content):
            self._text_frames = FrameTemplate(lambda text: self._chunk(self._text_delta(text)))
        self._audio_frames = FrameTemplate(lambda data: self._chunk(Delta(audio=ChoiceDeltaAudio(data=data))))

    def opening(self) -> bytes:
        content = "" if not self._has_audio or self._answer.text_in_content else None
        if self._answer.image is not None:
            content = None
        delta = Delta(role="assistant", content=content, refusal=None)
        if self._is_audio_open:
            delta.audio = ChoiceDeltaAudio(id=self._answer.audio_id, transcript="")
        return frame(self._chunk(delta))

    def text(self, text: str, tokens: Sequence[SampledToken] = ()) -> bytes:
        """A frame with new text, or b"" if there is none."""
        if not text and not tokens:
            return b""
        is_held_back = self._has_audio and not self._is_audio_open
        if self._text_frames is not None and not is_held_back and not tokens:
            return self._text_frames.frame(text)
        delta = self._text_delta(text) if text or not is_held_back else Delta()
        if is_held_back and delta.audio is not None:
            self._is_audio_open, delta.audio.id = True, self._answer.audio_id
        return frame(self._chunk(delta, tokens=tokens))

    def audio(self, data: bytes) -> bytes:
        """A frame with new audio, or b"" if the data is too short."""
        return self._audio(self._base64.push(data))

    def image(self, url: str) -> bytes:
        return frame(self._chunk(Delta(images=[_message_image(url)])))

    def tool_call(self, piece: ToolCallDelta) -> bytes:
        self._has_calls = True
        function = ChoiceDeltaToolCallFunction(arguments=piece.arguments)
        call = ChoiceDeltaToolCall(index=piece.index, function=function)
        if piece.call_id is not None:
            call.id, call.type = piece.call_id, "function"
            function.name = piece.name
        return frame(self._chunk(Delta(tool_calls=[call])))

    def closing(self, last_audio: bytes, expires_at: int, finish_reason: FinishReason) -> Iterator[bytes]:
        """The frames after the last text and audio. `last_audio` is the audio encoder's final
        output."""
        if self._has_audio and not self._is_audio_open and not self._has_calls:
            self._is_audio_open = True
            yield frame(self._chunk(Delta(audio=ChoiceDeltaAudio(id=self._answer.audio_id, transcript=""))))
        if self._is_audio_open:
            # One frame, since only the last one may end in padding.
            yield self._audio(self._base64.push(last_audio) + self._base64.flush())
            yield frame(self._chunk(Delta(audio=ChoiceDeltaAudio(expires_at=expires_at))))
        yield frame(self._chunk(Delta(), finish_reason))

    def _text_delta(self, text: str) -> Delta:
        if not self._has_audio:
            return Delta(content=text)
        audio = ChoiceDeltaAudio(transcript=text)
        return Delta(content=text, audio=audio) if self._answer.text_in_content else Delta(audio=audio)

    def _audio(self, data: str) -> bytes:
        return self._audio_frames.frame(data) if data else b""

    def _chunk(
        self, delta: Delta, finish_reason: FinishReason | None = None, *, tokens: Sequence[SampledToken] = ()
    ) -> ChatCompletionChunk:
        logprobs = choice_logprobs(tokens) if tokens else None
        choice = ChunkChoice(index=self._index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return self._answer.chunk([choice])


def _message_image(url: str) -> MessageImage:
    return MessageImage(type="image_url", index=0, image_url=ImageUrl(url=url))


def _logprob(token: TokenLogprob) -> TopLogprob:
    return TopLogprob(
        token=token.text, logprob=max(token.logprob, LOWEST_LOGPROB), bytes=list(token.utf8) or None
    )
