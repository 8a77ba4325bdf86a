"""The bodies that each kind of server is sent, and chunks in the shape of each."""

import json

import pytest
from pydantic import JsonValue

from benchmarks.serving.client import Chunk, Served, StreamError
from benchmarks.serving.requests import ADAPTERS, Adapter, omni_server, vllm_omni
from benchmarks.serving.workload import WORKLOADS, Turn, Workload
from tests.unit.bench.frames import chunk, pcm16, usage, wav

W1 = WORKLOADS["W1"]
TEXT_ONLY = W1.model_copy(update={"modalities": "text", "codec_tokens": 0})
TURN = Turn(system="Speak.", text="word word", wav=None)


def body(adapter: Adapter, workload: Workload = W1, turn: Turn = TURN) -> dict[str, JsonValue]:
    return adapter(Served("m", "Chelsie", None), workload, turn)


def read(payload: JsonValue) -> tuple[str, bytes, str | None]:
    """Text, samples and finish reason."""
    parsed = Chunk.parse(json.dumps(payload).encode())
    return parsed.text, parsed.samples, parsed.finish_reason


def counts(payload: JsonValue) -> tuple[int, int | None, int, int | None]:
    """Tokens of the prompt, cached ones of it, of the text, of the codec."""
    used = Chunk.parse(json.dumps(payload).encode()).usage
    assert used is not None
    return used.prompt_tokens, used.cached_tokens, used.text_tokens, used.codec_tokens


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_answers_text_is_streamed_with_usage_and_has_an_exact_length(name: str) -> None:
    asked = body(ADAPTERS[name], TEXT_ONLY)

    assert asked["messages"] == [
        {"role": "system", "content": "Speak."},
        {"role": "user", "content": "word word"},
    ]
    assert (asked["model"], asked["stream"], asked["stream_options"]) == ("m", True, {"include_usage": True})
    assert (asked["max_tokens"], asked["min_tokens"], asked["ignore_eos"]) == (64, 64, True)
    assert not {"audio", "voice", "stage_sampling", "sampling_params_list"} & asked.keys()


def test_audio_travels_as_a_part_of_the_message() -> None:
    asked = body(omni_server, turn=Turn(system="Speak.", text="", wav=b"RIFF"))

    assert asked["messages"] == [
        {"role": "system", "content": "Speak."},
        {
            "role": "user",
            "content": [{"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}],
        },
    ]


def test_omni_server_is_asked_for_an_exact_number_of_codec_tokens() -> None:
    asked = body(omni_server)

    assert asked["modalities"] == ["text", "audio"]
    assert asked["audio"] == {"voice": "Chelsie", "format": "pcm16"}
    assert asked["stage_sampling"] == {"talker": {"max_tokens": 250, "min_tokens": 250, "ignore_eos": True}}


def test_omni_server_sends_transcript_and_audio_in_delta_audio() -> None:
    opening = chunk(
        {"role": "assistant", "content": None, "refusal": None, "audio": {"id": "a", "transcript": ""}}
    )
    assert read(opening) == ("", b"", None)
    assert read(chunk({"audio": {"transcript": "Hello"}})) == ("Hello", b"", None)
    assert read(chunk({"audio": {"data": pcm16(6)}})) == ("", b"\x01\x02" * 6, None)
    assert read(chunk({"audio": {"expires_at": 1780003600}})) == ("", b"", None)
    assert read(chunk({}, "length")) == ("", b"", "length")
    assert counts(usage(64, 250)) == (60, 16, 64, 250)
    assert read(chunk({"content": "text only"})) == ("text only", b"", None)


def test_vllm_omni_is_asked_for_exact_lengths_stage_by_stage() -> None:
    asked = body(vllm_omni)

    stages = asked["sampling_params_list"]
    assert isinstance(stages, list)
    thinker, talker, code2wav = stages
    assert isinstance(thinker, dict)
    assert isinstance(talker, dict)
    assert isinstance(code2wav, dict)
    exact = {
        name: (stage.get("min_tokens"), stage["max_tokens"])
        for name, stage in (("0", thinker), ("1", talker))
    }
    assert exact == {"0": (64, 64), "1": (250, 250)}
    assert talker["stop_token_ids"] == list(range(8194, 8448))
    assert (asked["voice"], asked["audio"]) == ("Chelsie", {"format": "wav"})


def test_vllm_omni_sends_a_wav_file_as_content_where_the_modality_is_audio() -> None:
    assert read(chunk({"role": "assistant", "content": ""}, modality="text")) == ("", b"", None)
    assert read(chunk({"content": "Hello"}, modality="text")) == ("Hello", b"", None)
    zero: JsonValue = {"prompt_tokens": 60, "completion_tokens": 0, "total_tokens": 60}
    audio = chunk({"content": wav(6)}, "stop", modality="audio", usage=zero, audio_metadata={"channels": 1})
    assert read(audio) == ("", b"\x01\x02" * 6, "stop")
    assert counts(audio) == (60, None, 0, None)
    assert read(chunk({"content": pcm16(6)}, modality="audio")) == ("", b"\x01\x02" * 6, None)
    assert read(chunk({"content": ""}, modality="audio")) == ("", b"", None)


def test_vllm_omnis_audio_of_another_rate_is_refused() -> None:
    with pytest.raises(StreamError, match="not 24000 Hz mono"):
        read(chunk({"content": wav(6, rate=16_000)}, modality="audio"))


def test_plain_vllm_sends_text_as_content() -> None:
    assert read(chunk({"role": "assistant", "content": ""})) == ("", b"", None)
    assert read(chunk({"content": "Hello"}, "length")) == ("Hello", b"", "length")
    end: JsonValue = {
        "choices": [],
        "usage": {"prompt_tokens": 9, "total_tokens": 73, "completion_tokens": 64},
    }
    assert counts(end) == (9, None, 64, None)


def test_codec_tokens_are_taken_off_where_the_server_counts_text_and_audio_together() -> None:
    counted: JsonValue = {
        "choices": [],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 314,
            "completion_tokens_details": {"audio_tokens": 250},
        },
    }

    assert counts(counted) == (9, None, 64, 250)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"error": {"message": "the talker died", "code": 500}}', "error in the stream: the talker died"),
        (b'{"error": "the talker died"}', "error in the stream: the talker died"),
        (b"<html>", "not a chunk of a chat completion: event: json_invalid"),
        (
            b'{"choices": [{"delta": {"content": 5}}]}',
            "not a chunk of a chat completion: choices.0.delta.content",
        ),
    ],
)
def test_what_is_not_a_chunk_fails_the_request_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(StreamError) as failed:
        Chunk.parse(data)
    assert str(failed.value).startswith(reason)


@pytest.mark.parametrize("data", ["AAA", "AA*A", "ä"])
def test_audio_that_is_not_base64_fails_the_request(data: str) -> None:
    with pytest.raises(StreamError, match="not base64"):
        read(chunk({"audio": {"data": data}}))
