"""What an answer says, so that it can be compared with another one: text and numbers of tokens exactly, sound
up to `ROUNDING`."""

import base64
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.audio_files import read_audio
from tests.load.wire import Reply
from tests.unit.api.schema import check_completion, check_error
from tests.unit.api.sse_validator import parse_frames, read_stream

ROUNDING = 1
"""Steps of 16 bits by which a sample may differ: code2wav computes what is there in one step, and sums of
floats depend on the sizes of the matrices. Other codec tokens would move the sound further: of six utterances
sampled with other seeds, each piece of 20 ms was off by 250 steps or more."""


@dataclass(frozen=True)
class Answer:
    text: str
    sound: bytes
    """16 bit, little-endian; empty if there is none."""
    finish_reason: str
    text_tokens: int
    codec_tokens: int

    def difference(self, wanted: "Answer") -> str | None:
        """In what this answer is not the wanted one; None if it is."""
        for name in ("text", "finish_reason", "text_tokens", "codec_tokens"):
            mine, theirs = getattr(self, name), getattr(wanted, name)
            if mine != theirs:
                return f"{name}: {mine!r} instead of {theirs!r}"
        if len(self.sound) != len(wanted.sound):
            return f"{len(self.sound)} bytes of sound instead of {len(wanted.sound)}"
        mine, theirs = (np.frombuffer(sound, "<i2").astype(np.int32) for sound in (self.sound, wanted.sound))
        most = int(np.abs(mine - theirs).max(initial=0))
        return None if most <= ROUNDING else f"sound: off by up to {most}"


@dataclass(frozen=True)
class Failure:
    """What the server says instead of an answer, before the answer or within it."""

    status: int
    code: str
    retry_after: str | None


def outcome_of(reply: Reply) -> Answer | Failure:
    """Raises AssertionError or KeyError if the reply, which is whole, is neither."""
    assert reply.is_whole
    assert reply.status is not None
    if reply.status != 200:
        body = json.loads(reply.body)
        check_error(body)
        return Failure(reply.status, str(body["error"]["code"]), reply.headers.get("retry-after"))
    kind = reply.headers["content-type"].partition(";")[0]
    if kind.startswith("audio/"):
        return _answer("", _samples(reply.body), "", {})
    if kind == "text/event-stream":
        return _streamed(reply.body.decode())
    body = json.loads(reply.body)
    if "choices" in body:
        check_completion(body)
        return _completion(body)
    return Answer(body["text"], b"", "", body["usage"]["output_tokens"], 0)


def answer_id(reply: Reply) -> str | None:
    """The id that the server gave the answer; None for a sound file and a transcription, which have none."""
    if not reply.headers["content-type"].startswith(("application/json", "text/event-stream")):
        return None
    body = reply.body
    if reply.headers["content-type"].startswith("text/event-stream"):
        body = next(line for line in body.split(b"\n") if line.startswith(b"data: ")).removeprefix(b"data: ")
    found = json.loads(body).get("id")
    return None if found is None else str(found)


def _streamed(body: str) -> Answer | Failure:
    payloads = parse_frames(body)
    last = json.loads(payloads[-1]) if payloads[-1] != "[DONE]" else {}
    if "error" in last:
        check_error(last)
        return Failure(200, str(last["error"]["code"]), None)
    if last.get("type") == "speech.audio.done":
        events = [json.loads(payload) for payload in payloads[:-1]]
        assert all(event["type"] == "speech.audio.delta" for event in events)
        sound = base64.b64decode("".join(event["audio"] for event in events), validate=True)
        return _answer("", _samples(sound), "", {"audio_tokens": last["usage"]["output_tokens"]})
    if last.get("type") == "transcript.text.done":
        return Answer(last["text"], b"", "", last["usage"]["output_tokens"], 0)
    stream = read_stream(body, include_usage=True)
    assert stream.usage is not None
    details = stream.usage["completion_tokens_details"]
    return _answer(stream.transcript or stream.text, stream.data, stream.finish_reason, details)


def _completion(body: dict[str, Any]) -> Answer:
    (choice,) = body["choices"]
    message, details = choice["message"], body["usage"]["completion_tokens_details"]
    if message["audio"] is None:
        return _answer(message["content"], b"", choice["finish_reason"], details)
    sound = base64.b64decode(message["audio"]["data"], validate=True)
    return _answer(message["audio"]["transcript"], sound, choice["finish_reason"], details)


def _answer(text: str, sound: bytes, finish_reason: str, details: dict[str, Any]) -> Answer:
    return Answer(text, sound, finish_reason, details.get("text_tokens", 0), details.get("audio_tokens", 0))


def _samples(file: bytes) -> bytes:
    """Of a lossless file, or sound without a header as it is."""
    if not file.startswith((b"RIFF", b"fLaC")):
        return file
    if file.startswith(b"RIFF"):  # streamed: its header does not tell how long it is
        return file[44:]
    samples = read_audio(file)
    return bytes(samples.astype("<i2").tobytes())
