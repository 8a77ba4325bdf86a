"""Generated text and sound as OpenAI's response bodies and stream frames."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omni_server.api.logprobs import choice_logprobs
from omni_server.api.responses import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChunkChoice,
    CompletionTokensDetails,
    CompletionUsage,
    Delta,
    DeltaAudio,
    DeltaFunction,
    DeltaToolCall,
    MessageAudio,
    MessageToolCall,
    PromptTokensDetails,
)
from omni_server.api.sse import DONE, FrameTemplate, frame
from omni_server.audio.base64_stream import Base64Stream
from omni_server.types import FinishReason, SampledToken, ToolCallDelta, Usage


@dataclass(frozen=True)
class Answer:
    """What all parts of one answer have in common."""

    id: str
    created: int
    model: str
    fingerprint: str
    audio_id: str | None
    """None where the answer is text only."""
    text_in_content: bool = False
    """What is spoken is also in `content`."""


def completion_usage(usage: Usage) -> CompletionUsage:
    completion_tokens = usage.text_tokens + usage.codec_tokens
    return CompletionUsage(
        prompt_tokens=usage.prompt.total,
        completion_tokens=completion_tokens,
        total_tokens=usage.prompt.total + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            text_tokens=usage.prompt.text,
            audio_tokens=usage.prompt.audio,
            image_tokens=usage.prompt.image,
            video_tokens=usage.prompt.video,
            cached_tokens=usage.prompt.cached,
        ),
        completion_tokens_details=CompletionTokensDetails(
            text_tokens=usage.text_tokens,
            audio_tokens=usage.codec_tokens,
            reasoning_tokens=0,
            accepted_prediction_tokens=0,
            rejected_prediction_tokens=0,
        ),
    )


@dataclass(frozen=True)
class ChoiceText:
    """What one choice of an answer says, the sound apart."""

    text: str
    tool_calls: tuple[MessageToolCall, ...]
    logprobs: tuple[SampledToken, ...] | None
    """None where they were not asked for."""
    finish_reason: FinishReason


def message_audio(answer: Answer, text: str, audio_file: bytes, expires_at: int) -> MessageAudio:
    """Base64 of a long recording takes a while: call it in a thread."""
    assert answer.audio_id is not None
    data = base64.b64encode(audio_file).decode("ascii")
    return MessageAudio(id=answer.audio_id, data=data, expires_at=expires_at, transcript=text)


def render_completion(answer: Answer, choices: Sequence[ChoiceText], audio: MessageAudio | None, usage: Usage) -> bytes:
    """The body of an answer that is not streamed; with `audio`, which is long, call it in a thread."""
    completion = ChatCompletion(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        system_fingerprint=answer.fingerprint,
        choices=[
            Choice(
                index=index,
                message=AssistantMessage(
                    content=_content(answer, choice, audio),
                    audio=audio,
                    tool_calls=list(choice.tool_calls) or None,
                ),
                logprobs=None if choice.logprobs is None else choice_logprobs(choice.logprobs),
                finish_reason=choice.finish_reason,
            )
            for index, choice in enumerate(choices)
        ],
        usage=completion_usage(usage),
    )
    return completion.model_dump_json().encode()


def _content(answer: Answer, choice: ChoiceText, audio: MessageAudio | None) -> str | None:
    if audio is not None and not answer.text_in_content:
        return None
    return None if choice.tool_calls and not choice.text else choice.text


class ChunkRenderer:
    """What is the same in all chunks of a streamed answer."""

    def __init__(self, answer: Answer, *, include_usage: bool) -> None:
        self.answer = answer
        self._include_usage = include_usage

    def ending(self, usage: Usage) -> Iterator[bytes]:
        """What follows when all choices have ended."""
        if self._include_usage:
            yield frame(self.chunk([], completion_usage(usage)))
        yield DONE

    def chunk(self, choices: list[ChunkChoice], usage: CompletionUsage | None = None) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self.answer.id,
            object="chat.completion.chunk",
            created=self.answer.created,
            model=self.answer.model,
            system_fingerprint=self.answer.fingerprint,
            choices=choices,
        )
        if self._include_usage:
            chunk.usage = usage
        return chunk


class ChoiceRenderer:
    """The frames of one choice of a streamed answer.

    OpenAI's client builds the message by concatenating strings and adding numbers, so that the role, the audio's
    id and its expiry, the id and the name of a call are each sent exactly once.
    """

    def __init__(self, chunks: ChunkRenderer, index: int, *, may_call: bool) -> None:
        """With `may_call`, the audio's id waits for something to be said: a call has no sound."""
        self._chunks = chunks
        self._answer = chunks.answer
        self._index = index
        self._has_audio = self._answer.audio_id is not None
        self._is_audio_open = self._has_audio and not may_call
        self._has_calls = False
        self._base64 = Base64Stream()
        self._text_frames: FrameTemplate | None = None
        if not (self._has_audio and self._answer.text_in_content):
            self._text_frames = FrameTemplate(lambda text: self._chunk_of(self._text_delta(text)))
        self._audio_frames = FrameTemplate(lambda data: self._chunk_of(Delta(audio=DeltaAudio(data=data))))

    @property
    def is_audio_open(self) -> bool:
        """The client knows the audio's id."""
        return self._is_audio_open

    def opening(self) -> bytes:
        content = "" if not self._has_audio or self._answer.text_in_content else None
        delta = Delta(role="assistant", content=content, refusal=None)
        if self._is_audio_open:
            delta.audio = DeltaAudio(id=self._answer.audio_id, transcript="")
        return self._delta(delta)

    def text(self, text: str, tokens: Sequence[SampledToken] = ()) -> bytes:
        """New text; b"" for none, so that no empty frame is sent."""
        if not text and not tokens:
            return b""
        if self._has_audio and not self._is_audio_open and text:
            self._is_audio_open = True
            delta = self._text_delta(text)
            assert delta.audio is not None
            delta.audio.id = self._answer.audio_id
            return self._delta(delta, tokens=tokens)
        if self._has_audio and not self._is_audio_open:  # tokens whose text is held back
            return self._delta(Delta(), tokens=tokens)
        if tokens or self._text_frames is None:
            return self._delta(self._text_delta(text), tokens=tokens)
        return self._text_frames.frame(text)

    def audio(self, data: bytes) -> bytes:
        """New bytes of sound; b"" while they are too few for a frame."""
        return self._audio(self._base64.push(data))

    def tool_call(self, piece: ToolCallDelta) -> bytes:
        self._has_calls = True
        call = DeltaToolCall(index=piece.index, function=DeltaFunction(arguments=piece.arguments))
        if piece.call_id is not None:
            call.id, call.type = piece.call_id, "function"
            call.function.name = piece.name
        return self._delta(Delta(tool_calls=[call]))

    def closing(self, last_audio: bytes, expires_at: int, finish_reason: FinishReason) -> Iterator[bytes]:
        """All that follows the last text and sound. `last_audio` are bytes that the audio encoder still held."""
        if self._has_audio and not self._is_audio_open and not self._has_calls:
            self._is_audio_open = True
            yield self._delta(Delta(audio=DeltaAudio(id=self._answer.audio_id, transcript="")))
        if self._is_audio_open:
            # One piece, since only the very last one may end in padding.
            yield self._audio(self._base64.push(last_audio) + self._base64.flush())
            yield self._delta(Delta(audio=DeltaAudio(expires_at=expires_at)))
        yield self._delta(Delta(), finish_reason)

    def _text_delta(self, text: str) -> Delta:
        if not self._has_audio:
            return Delta(content=text)
        audio = DeltaAudio(transcript=text)
        return Delta(content=text, audio=audio) if self._answer.text_in_content else Delta(audio=audio)

    def _audio(self, data: str) -> bytes:
        return self._audio_frames.frame(data) if data else b""

    def _delta(
        self, delta: Delta, finish_reason: FinishReason | None = None, *, tokens: Sequence[SampledToken] = ()
    ) -> bytes:
        return frame(self._chunk_of(delta, finish_reason, tokens=tokens))

    def _chunk_of(
        self, delta: Delta, finish_reason: FinishReason | None = None, *, tokens: Sequence[SampledToken] = ()
    ) -> ChatCompletionChunk:
        logprobs = choice_logprobs(tokens) if tokens else None
        choice = ChunkChoice(index=self._index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return self._chunks.chunk([choice])
