"""Frames of streams, written as the servers write them."""

import base64
import io
import json
import wave

from pydantic import JsonValue

DONE = b"data: [DONE]\n\n"


def frame(payload: JsonValue) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def chunk(delta: JsonValue, finish_reason: str | None = None, **more: JsonValue) -> JsonValue:
    choice: JsonValue = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1780000000,
        "model": "scripted",
        "choices": [choice],
        "usage": None,
        **more,
    }


def usage(text_tokens: int, codec_tokens: int, prompt_tokens: int = 60) -> JsonValue:
    """The last chunk of omni-server."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1780000000,
        "model": "scripted",
        "choices": [],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": text_tokens + codec_tokens,
            "total_tokens": prompt_tokens + text_tokens + codec_tokens,
            "prompt_tokens_details": {"text_tokens": prompt_tokens, "audio_tokens": 0, "cached_tokens": 16},
            "completion_tokens_details": {"text_tokens": text_tokens, "audio_tokens": codec_tokens},
        },
    }


def pcm16(samples: int) -> str:
    return base64.b64encode(b"\x01\x02" * samples).decode()


def wav(samples: int, rate: int = 24_000) -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(b"\x01\x02" * samples)
    return base64.b64encode(file.getvalue()).decode()


def spoken(text_tokens: int, codec_tokens: int, num_samples: int | None = None) -> tuple[bytes, ...]:
    """A whole answer of omni-server: two deltas of text, two of audio that hold one and three quarters of
    it."""
    samples = 480 * codec_tokens if num_samples is None else num_samples
    return (
        frame(chunk({"role": "assistant", "content": None, "audio": {"id": "audio_1", "transcript": ""}})),
        frame(chunk({"audio": {"transcript": "Hello"}})),
        frame(chunk({"audio": {"data": pcm16(samples // 4)}})),
        b": keep-alive\n\n",
        frame(chunk({"audio": {"transcript": " there"}})),
        frame(chunk({"audio": {"data": pcm16(samples - samples // 4)}})),
        frame(chunk({"audio": {"expires_at": 1780003600}})),
        frame(chunk({}, "length")),
        frame(usage(text_tokens, codec_tokens)),
        DONE,
    )


def written(text_tokens: int) -> tuple[bytes, ...]:
    """A whole answer of plain vLLM."""
    end: JsonValue = {
        "id": "chatcmpl-1",
        "choices": [],
        "usage": {"prompt_tokens": 60, "completion_tokens": text_tokens, "prompt_tokens_details": None},
    }
    return (
        frame(chunk({"role": "assistant", "content": ""})),
        frame(chunk({"content": "Hello"})),
        frame(chunk({"content": " there"}, "length")),
        frame(end),
        DONE,
    )
