"""The whole product over HTTP: a server process with three engines, the demo checkpoint, the official
client."""

import base64
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
import openai
import pytest

from tests.audio_files import read_audio
from tests.integration.server_process import MODEL, ServerProcess
from tests.omni_families import OmniFamily, for_each_family, for_each_reader
from tests.unit.api.clients import URL, base64_of, chat, data_url, media
from tests.unit.api.schema import check_completion, check_model
from tests.unit.api.sse_validator import StreamedAnswer, read_stream

KINDS = ("text", "audio", "image", "video")
HELLO = "Hello, who are you?"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "seed": 7}
GREEDY_TALKER: dict[str, Any] = {"temperature": 0, "max_tokens": 48}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
ENDLESS: dict[str, Any] = {"max_tokens": 3500, "ignore_eos": True}

SPEECH_PART = {
    "type": "input_audio",
    "input_audio": {"data": base64_of(media("speech_hello.wav")), "format": "wav"},
}
IMAGE_PART = {"type": "image_url", "image_url": {"url": data_url(media("shapes.png"), "image/png")}}
VIDEO_PART = {"type": "video_url", "video_url": {"url": data_url(media("ball.mp4"), "video/mp4")}}


def spoken(
    content: Any = HELLO, *, voice: str = "Chelsie", audio_format: str = "pcm16", **fields: Any
) -> Any:
    """A request that is answered by voice; greedy in both stages unless told otherwise."""
    audio = {"modalities": ["text", "audio"], "audio": {"voice": voice, "format": audio_format}}
    return chat(content, **(GREEDY | audio | {"stage_sampling": {"talker": GREEDY_TALKER}} | fields))


def written(content: Any = HELLO, **fields: Any) -> Any:
    return chat(content, **(GREEDY | fields))


def arguments(body: dict[str, Any]) -> Any:
    """A body as arguments of the official client, which takes what is not OpenAI's as `extra_body`."""
    extensions = {"stage_sampling", "ignore_eos", "min_tokens", "stop_token_ids"} & body.keys()
    return {name: value for name, value in body.items() if name not in extensions} | {
        "extra_body": {name: body[name] for name in extensions}
    }


@pytest.fixture(scope="module")
def hello(client: httpx2.Client) -> dict[str, Any]:
    """The answer to `spoken()`; whatever other requests do, it stays the same."""
    return answer_to(client, spoken())


def answer_to(client: httpx2.Client, body: Any) -> dict[str, Any]:
    response = client.post(URL, json=body)
    assert response.status_code == 200, response.text
    completion: dict[str, Any] = response.json()
    check_completion(completion)
    assert completion["model"] == MODEL
    assert re.fullmatch(r"fp_[0-9a-f]{10}", completion["system_fingerprint"])
    usage = completion["usage"]
    assert usage["prompt_tokens"] == sum(usage["prompt_tokens_details"][f"{kind}_tokens"] for kind in KINDS)
    assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    assert usage["completion_tokens"] == sum(usage["completion_tokens_details"].values())
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return completion


def stream_of(client: httpx2.Client, body: Any) -> StreamedAnswer:
    response = client.post(URL, json=body | STREAM)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return read_stream(response.text, include_usage=True)


def usage_of(answer: StreamedAnswer | dict[str, Any]) -> dict[str, Any]:
    """Without what a repetition finds in the prefix cache."""
    usage = answer.usage if isinstance(answer, StreamedAnswer) else answer["usage"]
    assert usage is not None
    return usage | {"prompt_tokens_details": usage["prompt_tokens_details"] | {"cached_tokens": None}}


def message_of(completion: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = completion["choices"][0]["message"]
    return message


def text_of(completion: dict[str, Any]) -> str:
    """What was written or spoken."""
    message = message_of(completion)
    text: str = message["content"] if message["audio"] is None else message["audio"]["transcript"]
    return text


def sound_of(completion: dict[str, Any]) -> bytes:
    return base64.b64decode(message_of(completion)["audio"]["data"], validate=True)


def samples_of(completion: dict[str, Any]) -> npt.NDArray[np.int16]:
    return np.frombuffer(sound_of(completion), "<i2")


def num_tokens(completion: dict[str, Any]) -> tuple[int, int]:
    """Of text and of speech."""
    details = completion["usage"]["completion_tokens_details"]
    return details["text_tokens"], details["audio_tokens"]


def outcome(completion: dict[str, Any]) -> tuple[str, bytes]:
    """All that must be the same when a request is repeated."""
    return text_of(completion), sound_of(completion) if message_of(completion)["audio"] is not None else b""


# -- probes and models


@for_each_reader
def test_probes_and_models(family: OmniFamily, server: ServerProcess, client: httpx2.Client) -> None:
    assert server.unready_statuses <= {(503, "model_not_ready")}
    for path in ("/health", "/ready", "/live"):
        assert client.get(path).status_code == 200
    listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [MODEL]
    check_model(listed[0])
    assert listed[0]["voices"] == list(family.voices)


def test_terminal_and_models_say_that_the_weights_are_random(
    server: ServerProcess, client: httpx2.Client
) -> None:
    notice = "The weights of this model are random: it generates nonsense and noise."
    assert f"  Note     {notice}\n" in server.log
    (model,) = client.get("/v1/models").json()["data"]
    assert model["about"]["notice"] == notice


def test_official_client_lists_the_model(official: openai.OpenAI) -> None:
    assert [model.id for model in official.models.list()] == [MODEL]
    assert official.models.retrieve(MODEL).id == MODEL


# -- text


@for_each_family
def test_text_is_the_same_in_one_piece_and_streamed(client: httpx2.Client) -> None:
    whole = answer_to(client, written())
    streamed = stream_of(client, written())
    assert text_of(whole)
    assert message_of(whole)["audio"] is None
    assert streamed.text == text_of(whole)
    assert usage_of(streamed) == usage_of(whole)
    assert num_tokens(whole)[1] == 0


def test_official_client_reads_text(official: openai.OpenAI) -> None:
    completion = official.chat.completions.create(**arguments(written()))
    chunks = list(official.chat.completions.create(**arguments(written()), stream=True))
    assert completion.choices[0].message.content
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert joined == completion.choices[0].message.content


@pytest.mark.parametrize("count", [1, 33])
def test_thinker_writes_exactly_as_many_tokens_as_it_is_told(client: httpx2.Client, count: int) -> None:
    completion = answer_to(client, written(max_tokens=count, min_tokens=count, ignore_eos=True))
    assert num_tokens(completion) == (count, 0)
    assert completion["choices"][0]["finish_reason"] == "length"


# -- speech


@for_each_family
def test_spoken_answer_has_sound_for_every_codec_token(family: OmniFamily, hello: dict[str, Any]) -> None:
    message = message_of(hello)
    assert message["content"] is None
    assert message["audio"]["transcript"]
    text_tokens, codec_tokens = num_tokens(hello)
    assert 0 < text_tokens <= GREEDY["max_tokens"]
    assert samples_of(hello).size == family.num_samples(codec_tokens) > 0
    assert np.abs(samples_of(hello).astype(np.float64)).max() > 300


@pytest.mark.parametrize("audio_format", ["wav", "flac", "mp3", "opus", "aac"])
def test_every_file_format_holds_the_same_speech(
    client: httpx2.Client, hello: dict[str, Any], audio_format: str
) -> None:
    data = sound_of(answer_to(client, spoken(audio_format=audio_format)))
    samples = read_audio(data)
    # AAC's frames are whole, and one comes before the first sample.
    assert len(samples) - len(samples_of(hello)) in range(3 * 1024 if audio_format == "aac" else 1)
    if audio_format in ("wav", "flac"):
        np.testing.assert_array_equal(samples, samples_of(hello))


@for_each_family
def test_streamed_speech_equals_that_in_one_piece(client: httpx2.Client, hello: dict[str, Any]) -> None:
    streamed = stream_of(client, spoken())
    np.testing.assert_array_equal(np.frombuffer(streamed.data, "<i2"), samples_of(hello))
    assert streamed.transcript == text_of(hello)
    assert usage_of(streamed) == usage_of(hello)
    assert streamed.finish_reason == hello["choices"][0]["finish_reason"]


@for_each_family
def test_sound_leaves_while_the_text_is_still_written(server: ServerProcess, client: httpx2.Client) -> None:
    """The thinker pauses until it is heard."""
    (thinker,) = map(int, re.findall(r"stage 'thinker' runs in process (\d+)", server.log))
    num_texts, is_heard = 0, False
    try:
        with client.stream("POST", URL, json=spoken(**ENDLESS) | STREAM) as response:
            for line in response.iter_lines():
                choices = json.loads(line[6:])["choices"] if line.startswith("data: {") else []
                audio = choices[0]["delta"].get("audio", {}) if choices else {}
                if audio.get("data"):
                    is_heard = True
                    os.kill(thinker, signal.SIGCONT)
                elif audio.get("transcript"):
                    num_texts += 1
                    if is_heard:
                        break
                    if num_texts == 100:
                        os.kill(thinker, signal.SIGSTOP)
            else:
                raise AssertionError(f"{num_texts} pieces of text, of which none came after sound")
    finally:
        os.kill(thinker, signal.SIGCONT)


def test_official_client_reads_speech(official: openai.OpenAI, hello: dict[str, Any]) -> None:
    completion = official.chat.completions.create(**arguments(spoken()))
    audio = completion.choices[0].message.audio
    assert audio is not None
    assert audio.transcript == text_of(hello)
    assert base64.b64decode(audio.data) == sound_of(hello)


@for_each_family
def test_official_accumulator_rebuilds_the_spoken_answer(family: OmniFamily, official: openai.OpenAI) -> None:
    # The accumulator raises for finish_reason "length", so the answer has to end by itself.
    body = arguments(spoken("Hi", max_tokens=None, stage_sampling={"talker": {"temperature": 0}}))
    with official.chat.completions.stream(**body, stream_options={"include_usage": True}) as events:
        completion = events.get_final_completion()
    message = completion.choices[0].message
    assert (message.role, message.content, completion.choices[0].finish_reason) == ("assistant", None, "stop")
    assert message.audio is not None
    assert message.audio.transcript
    usage = completion.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    codec_tokens = usage.completion_tokens_details.audio_tokens
    assert codec_tokens
    assert len(base64.b64decode(message.audio.data, validate=True)) == 2 * family.num_samples(codec_tokens)


@for_each_family
def test_voices_say_the_same_text_with_different_sound(
    family: OmniFamily, client: httpx2.Client, hello: dict[str, Any]
) -> None:
    other = answer_to(client, spoken(voice="Ethan"))
    assert text_of(other) == text_of(hello)
    assert sound_of(other) != sound_of(hello)
    aliases = [voice for voice in client.get("/v1/audio/voices").json()["voices"] if "alias_of" in voice]
    alias = next(voice["id"] for voice in aliases if voice["alias_of"] == "Chelsie")
    assert outcome(answer_to(client, spoken(voice=alias))) == outcome(hello)


@for_each_family
def test_seed_makes_sampled_answers_repeatable_whole_and_streamed(client: httpx2.Client) -> None:
    sampled: dict[str, Any] = {
        "temperature": 1,
        "stage_sampling": {"talker": {"temperature": 1, "max_tokens": 60}},
    }
    first, other = (outcome(answer_to(client, spoken(**sampled, seed=seed))) for seed in (11, 12))
    again = stream_of(client, spoken(**sampled, seed=11))
    assert (again.transcript, again.data) == first
    assert other[0] != first[0]
    assert other[1] != first[1]


@for_each_family
@pytest.mark.parametrize("count", [1, 25])
def test_talker_speaks_exactly_as_many_codec_tokens_as_it_is_told(
    family: OmniFamily, client: httpx2.Client, count: int
) -> None:
    talker = {"max_tokens": count, "min_tokens": count, "ignore_eos": True}
    completion = answer_to(client, spoken(stage_sampling={"talker": talker}))
    assert num_tokens(completion)[1] == count
    assert samples_of(completion).size == family.num_samples(count)
    assert completion["choices"][0]["finish_reason"] == "length"


@for_each_family
def test_stop_string_cuts_the_text_and_is_not_spoken(family: OmniFamily, client: httpx2.Client) -> None:
    """With k tokens before the stop string, what is spoken is what `max_tokens=k` speaks, or `k + 1` where
    the last token of a text has no row, whatever it was."""
    num_kept = 12

    def cut(max_tokens: int, **fields: Any) -> tuple[str, bytes]:
        talker = {"temperature": 0, "max_tokens": 300}
        body = spoken(ignore_eos=True, max_tokens=max_tokens, stage_sampling={"talker": talker}, **fields)
        return outcome(answer_to(client, body))

    kept, kept_and_one, kept_and_two, whole = (
        cut(count) for count in (num_kept, num_kept + 1, num_kept + 2, 40)
    )
    stop = kept_and_two[0].removeprefix(kept[0])
    assert stop
    assert stop not in kept[0]
    stopped = cut(40, stop=stop)
    assert stopped == (kept[0], (kept if family.speaks_last_token else kept_and_one)[1])
    assert len({kept[1], kept_and_one[1], kept_and_two[1], whole[1]}) == 4, (
        "the sound does not tell where the text ends"
    )


# -- many at once


MIXED = [
    spoken(),
    written(),
    spoken([SPEECH_PART], voice="Ethan"),
    spoken([IMAGE_PART, {"type": "text", "text": "What is this?"}]),
    written([VIDEO_PART]),
    spoken("Count to five.", seed=3, max_tokens=40),
    spoken(
        "Tell me a story.", voice="Ethan", stage_sampling={"talker": {"temperature": 0, "max_tokens": 150}}
    ),
    written("Bye", max_tokens=60),
]


def test_concurrent_requests_are_answered_as_one_by_one(client: httpx2.Client) -> None:
    """Convolutions over a batch round differently in the last bit of a float, hence of a 16-bit sample now
    and then."""
    one_by_one = [answer_to(client, body) for body in MIXED]
    with ThreadPoolExecutor(len(MIXED)) as threads:
        together = list(threads.map(lambda body: answer_to(client, body), MIXED))
    for answer, wanted in zip(together, one_by_one, strict=True):
        assert text_of(answer) == text_of(wanted)
        assert usage_of(answer) == usage_of(wanted)
        if message_of(wanted)["audio"] is not None:
            difference = samples_of(answer).astype(np.int32) - samples_of(wanted)
            assert np.abs(difference).max() <= 1


@for_each_family
def test_server_with_its_engines_stays_below_four_gigabytes(server: ServerProcess, hello: object) -> None:
    assert len(server.engine_pids()) == 3
    assert server.memory_bytes() < 4e9
