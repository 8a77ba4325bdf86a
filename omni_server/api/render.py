"""Generated text and sound as OpenAI's response bodies and stream frames."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass

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
    MessageAudio,
    PromptTokensDetails,
)
from omni_server.api.sse import DONE, FrameTemplate, frame
from omni_server.audio.base64_stream import Base64Stream
from omni_server.types import Finished, FinishReason, Usage


@dataclass(frozen=True)
class Answer:
    """What all parts of one answer have in common."""

    id: str
    created: int
    model: str
    audio_id: str | None
    """None where the answer is text only."""


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


def render_completion(
    answer: Answer, text: str, audio_file: bytes | None, expires_at: int, finished: Finished
) -> bytes:
    """The body of an answer that is not streamed. Base64 of a long recording takes a while: call it in a thread."""
    audio = None
    if answer.audio_id is not None:
        assert audio_file is not None
        data = base64.b64encode(audio_file).decode("ascii")
        audio = MessageAudio(id=answer.audio_id, data=data, expires_at=expires_at, transcript=text)
    completion = ChatCompletion(
        id=answer.id,
        created=answer.created,
        model=answer.model,
        choices=[
            Choice(
                message=AssistantMessage(content=text if audio is None else None, audio=audio),
                finish_reason=finished.finish_reason,
            )
        ],
        usage=completion_usage(finished.usage),
    )
    return completion.model_dump_json().encode()


class StreamRenderer:
    """The frames of one streamed answer.

    OpenAI's client builds the message by concatenating strings and adding numbers, so that the role, the audio's
    id and its expiry are each sent exactly once.
    """

    def __init__(self, answer: Answer, *, include_usage: bool) -> None:
        self._answer = answer
        self._include_usage = include_usage
        self._base64 = Base64Stream()
        self._text_frames = FrameTemplate(
            lambda text: self._chunk_of(
                Delta(content=text) if answer.audio_id is None else Delta(audio=DeltaAudio(transcript=text))
            )
        )
        self._audio_frames = FrameTemplate(lambda data: self._chunk_of(Delta(audio=DeltaAudio(data=data))))

    def opening(self) -> bytes:
        if self._answer.audio_id is None:
            return self._delta(Delta(role="assistant", content="", refusal=None))
        audio = DeltaAudio(id=self._answer.audio_id, transcript="")
        return self._delta(Delta(role="assistant", content=None, refusal=None, audio=audio))

    def text(self, text: str) -> bytes:
        """New text; b"" for none, so that no empty frame is sent."""
        return self._text_frames.frame(text) if text else b""

    def audio(self, data: bytes) -> bytes:
        """New bytes of sound; b"" while they are too few for a frame."""
        return self._audio(self._base64.push(data))

    def closing(self, last_audio: bytes, expires_at: int, finished: Finished) -> Iterator[bytes]:
        """All that follows the last text and sound. `last_audio` are bytes that the audio encoder still held."""
        if self._answer.audio_id is not None:
            # One piece, since only the very last one may end in padding.
            yield self._audio(self._base64.push(last_audio) + self._base64.flush())
            yield self._delta(Delta(audio=DeltaAudio(expires_at=expires_at)))
        yield self._delta(Delta(), finished.finish_reason)
        if self._include_usage:
            yield frame(self._chunk([], completion_usage(finished.usage)))
        yield DONE

    def _audio(self, data: str) -> bytes:
        return self._audio_frames.frame(data) if data else b""

    def _delta(self, delta: Delta, finish_reason: FinishReason | None = None) -> bytes:
        return frame(self._chunk_of(delta, finish_reason))

    def _chunk_of(self, delta: Delta, finish_reason: FinishReason | None = None) -> ChatCompletionChunk:
        choice = ChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=finish_reason)
        return self._chunk([choice], None)

    def _chunk(self, choices: list[ChunkChoice], usage: CompletionUsage | None) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self._answer.id,
            object="chat.completion.chunk",
            created=self._answer.created,
            model=self._answer.model,
            choices=choices,
        )
        if self._include_usage:
            chunk.usage = usage
        return chunk
