"""The mix of requests: every modality in and out, streamed and in one piece, short and long, all
repeatable."""

import json
from typing import Any

from tests.integration.server_process import MODEL
from tests.integration.test_server import (
    ENDLESS,
    IMAGE_PART,
    SPEECH_PART,
    STREAM,
    VIDEO_PART,
    spoken,
    written,
)
from tests.load.wire import Ask
from tests.unit.api.clients import URL, chat, data_url, media

SPEECH_URL = "/v1/audio/speech"
TRANSCRIPTIONS_URL = "/v1/audio/transcriptions"

_QUESTIONS = ("Hello, who are you?", "What is the weather like?", "Count to ten.", "Tell me a story.")
_CHAT_SOUND = b'"data":"'
_BOUNDARY = "a-line-that-is-nowhere-else"
_GRADIENT_PART = {"type": "image_url", "image_url": {"url": data_url(media("gradient.png"), "image/png")}}


def _json(kind: str, path: str, body: Any, sound_mark: bytes | None = None) -> Ask:
    return Ask(kind, path, "application/json", json.dumps(body).encode(), sound_mark)


def _chat(kind: str, body: Any) -> Ask:
    is_heard_early = body.get("stream", False) and "modalities" in body
    return _json(kind, URL, body, _CHAT_SOUND if is_heard_early else None)


def _seeded(seed: int, num_codes: int) -> Any:
    """Sampled in both stages, and repeatable."""
    talker = {"temperature": 0.9, "max_tokens": num_codes}
    return {"temperature": 1, "seed": seed, "stage_sampling": {"talker": talker}}


def _read_aloud(text: str, **fields: Any) -> Any:
    talker = {"temperature": 0, "max_tokens": 80}
    return {
        "model": MODEL,
        "input": text,
        "voice": "Ethan",
        "seed": 7,
        "stage_sampling": {"talker": talker},
    } | fields


def _transcribed(name: str, **fields: str) -> Ask:
    parts = [
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode()
        for field, value in {"model": MODEL, **fields}.items()
    ]
    head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode()
    body = b"".join([*parts, head, media(name), f"\r\n--{_BOUNDARY}--\r\n".encode()])
    kind = "transcription, streamed" if "stream" in fields else "transcription"
    return Ask(kind, TRANSCRIPTIONS_URL, f"multipart/form-data; boundary={_BOUNDARY}", body)


def mixed_asks(num_questions: int = len(_QUESTIONS), longest: int = 300) -> list[Ask]:
    """Each with an answer of its own; the kinds are about equally frequent. Fewer questions leave out none.
    `longest`: codes of the longest speech, Qwen3-Omni's frames."""
    asks: list[Ask] = []
    for number, question in enumerate(_QUESTIONS[:num_questions]):
        sampled = _seeded(100 + number, 2 * longest // 5)
        long = _seeded(200 + number, longest) | {"max_tokens": 100}
        asks += [
            _chat("text", written(question, max_tokens=40)),
            _chat("text, streamed", written(question, **(STREAM | {"temperature": 1, "seed": number}))),
            _chat("speech", spoken(question)),
            _chat("speech, streamed", spoken(question, **(sampled | STREAM))),
            _chat("long speech, streamed", spoken(question, voice="Ethan", **(long | STREAM))),
        ]
        asks.append(_json("read aloud", SPEECH_URL, _read_aloud(question, response_format="pcm"), b""))
    asks += [
        _chat("audio in", spoken([SPEECH_PART])),
        _chat("audio in, streamed", spoken([SPEECH_PART], **(_seeded(300, 60) | STREAM))),
        _chat("image in", spoken([{"type": "text", "text": "What is this?"}, IMAGE_PART])),
        _chat(
            "image in, streamed", written([_GRADIENT_PART, {"type": "text", "text": "And this?"}], **STREAM)
        ),
        _chat("video in", spoken([VIDEO_PART], **STREAM)),
        _chat("video in", written([VIDEO_PART, {"type": "text", "text": "What moves?"}])),
        _chat("all media in", spoken([IMAGE_PART, SPEECH_PART, VIDEO_PART], **(_seeded(301, 60) | STREAM))),
        _json(
            "read aloud, events",
            SPEECH_URL,
            _read_aloud("One, two, three.", response_format="wav", stream_format="sse"),
            b"speech.audio.delta",
        ),
        _json("read aloud, file", SPEECH_URL, _read_aloud("Good bye.", response_format="flac")),
        _transcribed("speech_count.wav"),
        _transcribed("speech_weather.wav", stream="true"),
    ]
    return asks


def reading_asks() -> list[Ask]:
    """The same of a model that only reads aloud."""

    def body(number: int, **fields: Any) -> Any:
        talker = {"temperature": 0.9, "min_tokens": 20, "max_tokens": 20}
        sampled = {"seed": number, "stage_sampling": {"talker": talker}}
        return _read_aloud(_QUESTIONS[0], **(sampled | {"voice": "alloy", "response_format": "pcm"} | fields))

    long = {"talker": {"temperature": 0, "min_tokens": 60, "max_tokens": 60}}
    return [
        _json("read aloud", SPEECH_URL, body(1), b""),
        _json("read aloud", SPEECH_URL, body(2, instructions="Whisper."), b""),
        _json("long, read aloud", SPEECH_URL, body(3, stage_sampling=long), b""),
        _json("read aloud, events", SPEECH_URL, body(4, stream_format="sse"), b"speech.audio.delta"),
        _json("read aloud, file", SPEECH_URL, body(5, response_format="flac")),
    ]


def spoken_asks(num_questions: int = len(_QUESTIONS), longest: int = 300) -> list[Ask]:
    """Streamed speech only, which shows when its sound begins."""
    asks = mixed_asks(num_questions, longest)
    return [ask for ask in asks if ask.sound_mark is not None and ask.kind == "speech, streamed"]


def endless_ask() -> Ask:
    """Speech that goes on for as long as the stages let it."""
    return _chat("endless speech", spoken(**ENDLESS, **STREAM) | {"stage_sampling": {"talker": ENDLESS}})


def bad_asks() -> list[tuple[Ask, int]]:
    """Requests that are refused, with the status that they get."""
    broken_image = {
        "type": "image_url",
        "image_url": {"url": data_url(b"\x89PNG\r\n\x1a\nnothing", "image/png")},
    }
    broken_video = {
        "type": "video_url",
        "video_url": {"url": data_url(media("ball.mp4")[:2000], "video/mp4")},
    }
    broken_sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    return [
        (Ask("bad input", URL, "application/json", b'{"model": '), 400),
        (_chat("bad input", chat("hi", temperature=-1)), 400),
        (_chat("bad input", spoken(voice="Nobody")), 400),
        (_chat("bad input", spoken([broken_image])), 400),
        (_chat("bad input", spoken([broken_video], **STREAM)), 400),
        (_chat("bad input", written([broken_sound])), 400),
        (_chat("bad input", written("word " * 10_000)), 400),
        (_chat("bad input", chat("hi") | {"model": "another"}), 404),
        (_json("bad input", SPEECH_URL, _read_aloud(" ")), 400),
        (
            Ask("bad input", TRANSCRIPTIONS_URL, f"multipart/form-data; boundary={_BOUNDARY}", b"--nothing"),
            400,
        ),
    ]
