"""Several choices, and the log-probabilities of each."""

import asyncio
import json
import math
import time
from typing import Any

import pytest

from omni_server.api.config import ApiConfig
from omni_server.errors import OverloadedError, StageError
from omni_server.generation import Deliver, Generation
from omni_server.types import OmniRequest, SampledToken, TextDelta, TokenLogprob
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import SPEECH, app_of, base64_of, chat, error_of, openai_client, post, tone
from tests.unit.api.fake_generator import (
    PROMPT,
    TEXT,
    FakeGenerator,
    Hang,
    ScriptEntry,
    Wait,
    finished,
)
from tests.unit.api.schema import check_chunk, check_completion
from tests.unit.api.sse_validator import parse_frames, read_stream

WITH_USAGE = {"stream_options": {"include_usage": True}}


class EachItsOwn(FakeGenerator):
    """One script for each choice, in order."""

    def __init__(self, *scripts: list[ScriptEntry]) -> None:
        super().__init__()
        self._scripts = list(scripts)

    async def submit(self, request: OmniRequest, deliver: Deliver) -> Any:
        self.script = self._scripts[len(self.requests)]
        return await super().submit(request, deliver)


def saying(*words: str) -> list[ScriptEntry]:
    return [*(TextDelta(word, (1,)) for word in words), finished()]


async def test_every_choice_is_a_request_with_a_seed_of_its_own() -> None:
    generator = EachItsOwn(saying("a"), saying("b"), saying("c"))
    response = await post(app_of(generator), chat(n=3, seed=2**63 - 1))
    body = response.json()
    check_completion(body)
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
    ]
    assert [request.request_id for request in generator.requests] == [
        f"{body['id']}-{index}" for index in range(3)
    ]
    seeds = [request.sampling["thinker"].seed for request in generator.requests]
    assert seeds == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert all(generation.num_closed == 1 for generation in generator.generations)


async def test_choices_have_one_deadline() -> None:
    generator = FakeGenerator()
    before = time.monotonic()
    await post(app_of(generator), chat(n=3))
    began = [request.began_at for request in generator.requests]
    assert began == [began[0]] * 3
    assert began[0] is not None
    assert before <= began[0] <= time.monotonic()


async def test_choices_of_a_chat_with_media_are_few() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": base64_of(tone()), "format": "wav"}}
    content = [{"type": "text", "text": "hi"}, sound]
    error = error_of(await post(app_of(FakeGenerator()), chat(content, n=9)))
    assert (error["param"], error["code"]) == ("n", "integer_above_max_value")
    assert (await post(app_of(FakeGenerator()), chat(content, n=8))).status_code == 200
    assert (
        await post(app_of(FakeGenerator()), chat([{"type": "text", "text": "hi"}], n=9))
    ).status_code == 200


async def test_usage_counts_the_prompt_once_and_all_choices() -> None:
    usage = (await post(app_of(FakeGenerator()), chat(n=2))).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (PROMPT.total, 12)


async def test_without_a_seed_no_choice_has_one() -> None:
    generator = FakeGenerator()
    await post(app_of(generator), chat(n=2))
    assert [request.sampling["thinker"].seed for request in generator.requests] == [None, None]


async def test_streamed_choices_open_in_order_and_come_as_they_are_made() -> None:
    first = asyncio.Event()
    generator = EachItsOwn([Wait(first), *saying("a", "b")], saying("c", "d"))
    async with AsgiCall(app_of(generator), chat(n=2, stream=True, **WITH_USAGE)) as call:
        before = await call.body_until(b'"content":"d"')
        first.set()
        text = (before + await call.body_until(b"[DONE]\n\n")).decode()
    chunks = [json.loads(payload) for payload in parse_frames(text)[:-1]]
    for chunk in chunks:
        check_chunk(chunk)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [choice["index"] for choice in choices[:2]] == [0, 1]
    for index, expected in ((0, "ab"), (1, "cd")):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice["delta"].get("role") for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        assert "".join(choice["delta"].get("content") or "" for choice in own) == expected
    order = [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]
    assert order == ["c", "d", "a", "b"]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failing_choice_fails_the_answer_and_ends_the_others(stream: bool) -> None:
    generator = EachItsOwn([Hang()], [TextDelta("a", (1,)), StageError("thinker", "broken")])
    response = await asyncio.wait_for(post(app_of(generator), chat(n=2, stream=stream)), 10)
    if stream:
        assert "broken" in parse_frames(response.text)[-1]
    else:
        error_of(response, 500)
    assert [generation.num_closed for generation in generator.generations] == [1, 1]


async def test_official_accumulator_rebuilds_all_choices() -> None:
    generator = EachItsOwn(saying("a", "b"), saying("c"))
    async with (
        openai_client(app_of(generator)) as client,
        client.chat.completions.stream(**chat(n=2)) as events,
    ):
        completion = await events.get_final_completion()
    assert [(choice.index, choice.message.content) for choice in completion.choices] == [(0, "ab"), (1, "c")]


async def test_choice_that_is_not_admitted_ends_those_before() -> None:
    class Full(FakeGenerator):
        async def submit(self, request: OmniRequest, deliver: Deliver) -> Generation:
            if self.requests:
                raise OverloadedError("full")
            return await super().submit(request, deliver)

    generator = Full()
    error_of(await post(app_of(generator), chat(n=2)), 503)
    assert [generation.num_closed for generation in generator.generations] == [1]


async def test_silence_of_all_choices_is_filled_with_comments() -> None:
    app = app_of(FakeGenerator(script=[Hang()]), ApiConfig(sse_keep_alive_s=0.01))
    async with AsgiCall(app, chat(n=2, stream=True)) as call:
        await call.body_until(b": keep-alive\n\n: keep-alive\n\n")


async def test_leaving_ends_all_choices() -> None:
    generator = FakeGenerator(script=[TextDelta("a", (1,)), Hang()])
    async with AsgiCall(app_of(generator), chat(n=3, stream=True)) as call:
        await call.body_until(b'"a"')
        call.leave()
        for generation in generator.generations:
            await asyncio.wait_for(generation.closed.wait(), 10)
    assert len(generator.generations) == 3


# -- log-probabilities


def token(utf8: bytes, logprob: float = -0.5, *, name: str | None = None) -> SampledToken:
    own = TokenLogprob(name or utf8.decode(errors="replace"), utf8, logprob)
    return SampledToken(own, (own, TokenLogprob("other", b"other", -math.inf)))


SCRIPT: list[ScriptEntry] = [
    TextDelta("Hi ", (1,), (token(b"Hi "),)),
    TextDelta("", (2,)),
    TextDelta("é", (3,), (token(b"\xc3"), token(b"\xa9"))),
    TextDelta("", (4,), (token(b"", name="<|x|>"),)),
    finished(),
]


async def logprobs_of(**fields: Any) -> list[dict[str, Any]]:
    generator = FakeGenerator(script=SCRIPT)
    body = (await post(app_of(generator), chat(logprobs=True, top_logprobs=2, **fields))).json()
    check_completion(body)
    assert generator.last_request.sampling["thinker"].logprobs == 2
    content: list[dict[str, Any]] = body["choices"][0]["logprobs"]["content"]
    return content


@pytest.mark.parametrize("fields", [{}, SPEECH])
async def test_bytes_of_the_tokens_join_to_the_text(fields: dict[str, Any]) -> None:
    content = await logprobs_of(**fields)
    assert bytes(byte for entry in content for byte in entry["bytes"] or []).decode() == "Hi é"
    assert content[0] == {
        "token": "Hi ",
        "logprob": -0.5,
        "bytes": list(b"Hi "),
        "top_logprobs": [
            {"token": "Hi ", "logprob": -0.5, "bytes": list(b"Hi ")},
            {"token": "other", "logprob": -9999.0, "bytes": list(b"other")},
        ],
    }
    assert (content[3]["token"], content[3]["bytes"]) == ("<|x|>", None)


async def test_logprobs_are_null_unless_asked_for() -> None:
    for fields in ({}, {"logprobs": False}, {"logprobs": None}):
        generator = FakeGenerator()
        body = (await post(app_of(generator), chat(**fields))).json()
        assert body["choices"][0]["logprobs"] is None
        assert generator.last_request.sampling["thinker"].logprobs is None


async def test_logprobs_alone_ask_for_no_other_tokens() -> None:
    generator = FakeGenerator()
    body = (await post(app_of(generator), chat(logprobs=True))).json()
    assert body["choices"][0]["logprobs"] == {"content": [], "refusal": None}
    assert generator.last_request.sampling["thinker"].logprobs == 0


@pytest.mark.parametrize("fields", [{}, SPEECH | {"audio": {"voice": "Ethan", "format": "pcm16"}}])
async def test_streamed_logprobs_come_with_their_text(fields: dict[str, Any]) -> None:
    app = app_of(FakeGenerator(script=SCRIPT))
    response = await post(app, chat(logprobs=True, top_logprobs=2, stream=True, **fields))
    answer = read_stream(response.text)
    assert answer.text + answer.transcript == "Hi é"
    entries = []
    for chunk in answer.chunks:
        choice = chunk["choices"][0]
        text = choice["delta"].get("content") or choice["delta"].get("audio", {}).get("transcript") or ""
        own = [] if choice["logprobs"] is None else choice["logprobs"]["content"]
        assert bytes(byte for entry in own for byte in entry["bytes"] or []).decode() == text
        entries += own
    assert entries == (await logprobs_of(**fields))


# -- the text of answers by voice in `content`


async def test_text_of_an_answer_by_voice_is_in_content_where_the_server_is_told_so() -> None:
    app = app_of(FakeGenerator(), ApiConfig(chat_text_in_content=True))
    message = (await post(app, chat(**SPEECH))).json()["choices"][0]["message"]
    assert message["content"] == message["audio"]["transcript"] == TEXT
    fields = SPEECH | {"audio": {"voice": "Ethan", "format": "pcm16"}, "stream": True}
    answer = read_stream((await post(app, chat(**fields))).text)
    assert answer.text == answer.transcript == TEXT


async def test_official_accumulator_rebuilds_logprobs() -> None:
    arguments: Any = chat(logprobs=True)
    async with (
        openai_client(app_of(FakeGenerator(script=SCRIPT))) as client,
        client.chat.completions.stream(**arguments) as events,
    ):
        choice = (await events.get_final_completion()).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == ["Hi ", "\ufffd", "\ufffd", "<|x|>"]
