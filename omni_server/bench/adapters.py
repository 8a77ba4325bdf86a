"""How different servers want to be asked, and how they stream: one class each."""

import base64
import io
import json
import wave
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

from omni_server.bench.workload import SAMPLE_RATE, Turn, Workload
from omni_server.client.stream import Chunk, StreamError, base64_decoded


@dataclass(frozen=True)
class TokenCounts:
    """What the server says it read and wrote; None if it does not say."""

    prompt: int
    text: int
    cached: int | None = None
    codec: int | None = None


@dataclass(frozen=True)
class Delta:
    """What one chunk of a stream adds."""

    text: str = ""
    audio: bytes = b""
    """Little-endian int16 samples, mono, 24 kHz."""
    finish_reason: str | None = None
    tokens: TokenCounts | None = None


@dataclass(frozen=True)
class Question:
    """What all requests of a run ask for, whatever the kind of server; each has a `Turn` of its own."""

    model: str
    workload: Workload
    temperature: float
    voice: str
    speech_stage: str
    """Name of omni-server's stage that samples codec tokens."""


class Adapter(Protocol):
    def body(self, question: Question, turn: Turn) -> bytes:
        """The JSON to post to `/v1/chat/completions`."""

    def read(self, data: bytes) -> Delta:
        """One event of the stream, except `[DONE]`. Raises `StreamError` if it is an error or not a chunk."""


class OpenAIText:
    """Plain `vllm serve`: text only."""

    def body(self, question: Question, turn: Turn) -> bytes:
        return json.dumps(_text_body(question, turn)).encode()

    def read(self, data: bytes) -> Delta:
        chunk = Chunk.parse(data)
        text = chunk.content
        return Delta(text, b"", chunk.finish_reason, _token_counts(chunk))


class OmniServer:
    """omni-server, and OpenAI's own shape: audio and its transcript are in `delta.audio`."""

    def body(self, question: Question, turn: Turn) -> bytes:
        body = _text_body(question, turn)
        workload = question.workload
        body["modalities"] = list(workload.modalities.split(","))
        if workload.codec_tokens:
            body["audio"] = {"voice": question.voice, "format": "pcm16"}
            body["stage_sampling"] = {question.speech_stage: _exact_length(workload.codec_tokens)}
        return json.dumps(body).encode()

    def read(self, data: bytes) -> Delta:
        chunk = Chunk.parse(data)
        text, audio = "", b""
        for choice in chunk.choices:
            delta = choice.delta
            if delta.content:
                text += delta.content
            if delta.audio is not None:
                text += delta.audio.transcript or ""
                if delta.audio.data:
                    audio += delta.audio.samples()
        return Delta(text, audio, chunk.finish_reason, _token_counts(chunk))


class VllmOmni:
    """vLLM-Omni 0.30: `delta.content` is text or the base64 of a complete WAV file, as `modality` beside
    `choices` says; the voice is a field of its own; `sampling_params_list` has one entry per stage and
    replaces the defaults of the stage, so that those of its deploy file for Qwen2.5-Omni are repeated here.

    Written after its source code; the lengths hold as vLLM's `SamplingParams` define them.
    """

    _CODEC_END_IDS = range(8194, 8448)
    """Ids of the talker's vocabulary that are no codes. As stop ids they are barred until `min_tokens` are
    written."""

    def body(self, question: Question, turn: Turn) -> bytes:
        body = _text_body(question, turn)
        workload = question.workload
        body["modalities"] = list(workload.modalities.split(","))
        thinker: dict[str, JsonValue] = {
            "temperature": question.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "seed": 42,
            "repetition_penalty": 1.1,
            **_exact_length(workload.text_tokens),
        }
        if workload.codec_tokens:
            body["audio"] = {"format": "wav"}
            body["voice"] = question.voice
            talker: dict[str, JsonValue] = {
                "temperature": 0.9,
                "top_p": 0.8,
                "top_k": 40,
                "seed": 42,
                "repetition_penalty": 1.05,
                "stop_token_ids": list(self._CODEC_END_IDS),
                **_exact_length(workload.codec_tokens),
            }
            code2wav: dict[str, JsonValue] = {"temperature": 0.0, "max_tokens": 2048}
            body["sampling_params_list"] = [thinker, talker, code2wav]
        return json.dumps(body).encode()

    def read(self, data: bytes) -> Delta:
        chunk = Chunk.parse(data)
        content = chunk.content
        finish_reason, tokens = chunk.finish_reason, _token_counts(chunk)
        if chunk.modality != "audio":
            return Delta(content, b"", finish_reason, tokens)
        return Delta("", _wav_samples(base64_decoded(content)) if content else b"", finish_reason, tokens)


ADAPTERS: dict[str, Adapter] = {
    "omni-server": OmniServer(),
    "vllm-omni": VllmOmni(),
    "openai-text": OpenAIText(),
}


def _text_body(question: Question, turn: Turn) -> dict[str, JsonValue]:
    content: JsonValue = turn.text
    if turn.wav is not None:
        data = base64.b64encode(turn.wav).decode("ascii")
        parts: list[JsonValue] = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
        if turn.text:
            parts.append({"type": "text", "text": turn.text})
        content = parts
    return {
        "model": question.model,
        "messages": [{"role": "system", "content": turn.system}, {"role": "user", "content": content}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": question.temperature,
        **_exact_length(question.workload.text_tokens),
    }


def _exact_length(tokens: int) -> dict[str, JsonValue]:
    return {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}


def _token_counts(chunk: Chunk) -> TokenCounts | None:
    usage = chunk.usage
    if usage is None:
        return None
    text, codec = usage.completion_tokens, None
    if usage.completion_tokens_details is not None:
        codec = usage.completion_tokens_details.audio_tokens
        if usage.completion_tokens_details.text_tokens is not None:
            text = usage.completion_tokens_details.text_tokens
        elif codec is not None:
            text -= codec
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else None
    return TokenCounts(prompt=usage.prompt_tokens, text=text, cached=cached, codec=codec)


def _wav_samples(file: bytes) -> bytes:
    """The samples of a WAV file; bytes without a RIFF header are taken for samples."""
    if not file.startswith(b"RIFF"):
        return file
    try:
        with wave.open(io.BytesIO(file)) as reader:
            layout = (reader.getframerate(), reader.getnchannels(), reader.getsampwidth())
            samples = reader.readframes(reader.getnframes())
    except (wave.Error, EOFError) as error:
        raise StreamError("audio that is not a PCM WAV file") from error
    if layout != (SAMPLE_RATE, 1, 2):
        raise StreamError(f"audio that is not {SAMPLE_RATE} Hz mono 16-bit: {layout}")
    return samples
