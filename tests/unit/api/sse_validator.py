"""Reads a raw event stream and asserts all that OpenAI's client would silently get wrong."""

import base64
import json
from dataclasses import dataclass
from typing import Any

from tests.unit.api.schema import check_chunk


@dataclass(frozen=True)
class StreamedAnswer:
    text: str
    """`delta.content`, joined."""
    transcript: str
    """`delta.audio.transcript`, joined."""
    data: bytes
    audio_id: str | None
    finish_reason: str
    usage: dict[str, Any] | None
    chunks: list[dict[str, Any]]


@dataclass(frozen=True)
class StreamedImage:
    partial: list[dict[str, Any]]
    completed: dict[str, Any]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [*self.partial, self.completed]


def read_image_stream(body: str, kind: str) -> StreamedImage:
    """A stream of `kind` (`image_generation`, `image_edit`) that has ended well."""
    events = parse_events(body)
    assert all(name == event["type"] for name, event in events)
    *partial, (last, completed) = events
    assert last == f"{kind}.completed"
    assert [name for name, _ in partial] == [f"{kind}.partial_image"] * len(partial)
    common = {"type", "b64_json", "background", "created_at", "output_format", "quality", "size"}
    assert completed.keys() == common | {"usage"}
    assert all(event.keys() == common | {"partial_image_index"} for _, event in partial)
    assert [event["partial_image_index"] for _, event in partial] == list(range(len(partial)))
    assert len({(event["output_format"], event["size"]) for _, event in events}) == 1
    usage = completed["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    for side in ("input", "output"):
        assert sum(usage[f"{side}_tokens_details"].values()) == usage[f"{side}_tokens"]
    return StreamedImage([event for _, event in partial], completed)


def parse_events(body: str) -> list[tuple[str, dict[str, Any]]]:
    """The names and payloads of all events; comments are skipped, and an error has no name."""
    assert body.endswith("\n\n")
    events = []
    for event in body.split("\n\n")[:-1]:
        lines = event.splitlines()
        if event.startswith(":"):
            assert len(lines) == 1
            continue
        *names, data = lines
        assert len(names) <= 1
        assert data.startswith("data: ")
        name = names[0].removeprefix("event: ") if names else ""
        assert name or not names
        payload: dict[str, Any] = json.loads(data.removeprefix("data: "))
        events.append((name, payload))
    return events


def parse_frames(body: str) -> list[str]:
    """The payloads of all frames; comments are skipped."""
    assert body.endswith("\n\n")
    frames = body.split("\n\n")[:-1]
    assert all(len(frame.splitlines()) == 1 for frame in frames), (
        "a frame is a single line, however lines are cut"
    )
    data = [frame for frame in frames if not frame.startswith(":")]
    assert all(frame.startswith("data: ") and len(frame) > len("data: ") for frame in data)
    return [frame.removeprefix("data: ") for frame in data]


def read_stream(body: str, *, include_usage: bool = False) -> StreamedAnswer:
    payloads = parse_frames(body)
    assert payloads.count("[DONE]") == 1
    assert payloads[-1] == "[DONE]"
    chunks: list[dict[str, Any]] = [json.loads(payload) for payload in payloads[:-1]]
    for chunk in chunks:
        check_chunk(chunk)
    assert (
        len(
            {
                tuple(chunk[name] for name in ("id", "created", "model", "system_fingerprint"))
                for chunk in chunks
            }
        )
        == 1
    )

    usage = None
    if include_usage:
        assert chunks[-1]["choices"] == []
        usage = chunks[-1]["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in (chunks[:-1] if include_usage else chunks)]
    deltas = [choice["delta"] for choice in choices]
    audio = [delta["audio"] for delta in deltas if "audio" in delta]
    data = [part["data"] for part in audio if "data" in part]

    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
    assert "role" in deltas[0]
    assert [choice["finish_reason"] is not None for choice in choices] == [False] * (len(choices) - 1) + [
        True
    ]
    assert choices[-1]["delta"] == {}
    ids = [part["id"] for part in audio if "id" in part]
    expiries = [index for index, part in enumerate(audio) if "expires_at" in part]
    assert len(ids) == len(expiries) == (1 if audio else 0)
    if audio:
        assert "id" in audio[0]
        assert expiries == [len(audio) - 1]
    pieces = [base64.b64decode(piece, validate=True) for piece in data]
    assert all(len(piece) % 6 == 0 and piece for piece in pieces[:-1])
    assert base64.b64decode("".join(data), validate=True) == b"".join(pieces), (
        "padding inside the joined base64"
    )
    return StreamedAnswer(
        text="".join(delta.get("content") or "" for delta in deltas),
        transcript="".join(part.get("transcript", "") for part in audio),
        data=b"".join(pieces),
        audio_id=ids[0] if ids else None,
        finish_reason=choices[-1]["finish_reason"],
        usage=usage,
        chunks=chunks,
    )
