"""Bodies of all POST operations, through the whole application without a socket."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from tests.fuzz.mutate import WORDS, changed_bytes, changed_json, changed_text
from tests.fuzz.oracle import check_log, check_refusal, watched_log
from tests.fuzz.target import Run, Target
from tests.unit.api.clients import SPEECH, URL, app_of, base64_of, chat, data_url, http_client, media, tone
from tests.unit.api.fake_generator import VERSATILE_MODEL, FakeGenerator

DEADLINE_S = 60.0
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "does it",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, "b"]}},
            "anyOf": [{"required": ["a"]}],
        },
    },
}
CHATS: tuple[dict[str, Any], ...] = (
    chat(
        [
            {"type": "text", "text": "a"},
            {
                "type": "input_audio",
                "input_audio": {"data": base64_of(tone(num_samples=4_800)), "format": "wav"},
            },
            {"type": "image_url", "image_url": {"url": data_url(media("shapes.png"), "image/png")}},
        ],
        **SPEECH,
        stream=True,
        stream_options={"include_usage": True},
        stage_sampling={"talker": {"temperature": 0.5, "seed": 1, "max_tokens": 9}},
        metadata={"a": "b"},
    ),
    chat(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=7,
        n=2,
        stop=["x"],
        stop_token_ids=[5],
        logprobs=True,
        top_logprobs=2,
        logit_bias={"5": 1},
        bad_words=["no"],
        min_tokens=1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        repetition_penalty=1.1,
    ),
    chat(tools=[_TOOL], tool_choice="auto", parallel_tool_calls=True)
    | {
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"text": "b"}, {"type": "refusal", "refusal": "c"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "assistant", "audio": {"id": "gone", "transcript": "said"}},
            {"role": "user", "content": "and?"},
        ],
    },
    chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}),
    chat(structured_outputs={"json": '{"type": "integer"}'}),
    chat(structured_outputs={"regex": "a+"}, tool_choice="none"),
    chat(structured_outputs={"choice": ["a", "b"]}),
    chat(
        tools=[_TOOL],
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
    ),
)
SPEECHES: tuple[dict[str, Any], ...] = (
    {"model": "omni", "input": "Good morning.", "voice": "alloy", "response_format": "mp3"},
    {
        "model": "omni",
        "input": "a",
        "voice": {"id": "Ethan"},
        "stream_format": "sse",
        "instructions": "low",
        "seed": 1,
    },
    {
        "model": "omni",
        "input": "b. c! d?",
        "response_format": "pcm",
        "speed": 1,
        "stage_sampling": {"talker": {}},
    },
)
IMAGES: tuple[dict[str, Any], ...] = (
    {"prompt": "A lighthouse"},
    {
        "model": "omni",
        "prompt": "A lighthouse at dusk",
        "n": 2,
        "size": "48x32",
        "seed": -1,
        "response_format": "b64_json",
        "output_format": "webp",
        "output_compression": 50,
        "quality": "auto",
        "background": "opaque",
        "moderation": "low",
        "user": "u",
        "stream": False,
    },
    {
        "prompt": "A lighthouse",
        "stream": True,
        "partial_images": 2,
        "negative_prompt": "rain",
        "num_inference_steps": 4,
        "guidance_scale": 2.5,
        "true_cfg_scale": 4,
        "include_parameters": True,
    },
)
_TYPES = (
    "application/json", "application/json; charset=utf-16", "application/vnd.api+json", "text/json", "",
    "application/json\x0b", "multipart/form-data", "application/json;" * 200, "application/xml", "APPLICATION/JSON",
)  # fmt: skip
_HEADERS: tuple[Mapping[str, str], ...] = (
    {"content-encoding": "gzip"}, {"transfer-encoding": "chunked"}, {"content-length": "5"},
    {"content-length": "9" * 400}, {"content-length": "-1"}, {"content-length": "٣"}, {"x-request-id": "a\x00b"},
    {"x-stainless-retry-count": "9" * 50}, {"authorization": "Bearer " + "x" * 5_000}, {"authorization": "Basic"},
    {"origin": "null"}, {"traceparent": "00-0-0-0"}, {"host": "localhost:99999999"}, {"host": "[::1"},
    {"host": "localhost, evil"}, {"expect": "100-continue"}, {"accept": "\xff"}, {"cookie": "a=" + "b" * 9_000},
    {"x-forwarded-for": "evil"}, {"upgrade": "websocket", "connection": "upgrade"},
)  # fmt: skip


@asynccontextmanager
async def _posting() -> AsyncIterator[Any]:
    """Gives `post(path, body, headers) -> "200" or the code of the refusal`, with all that must hold."""
    app = app_of(FakeGenerator(VERSATILE_MODEL))
    num_sent = 0
    with watched_log() as log:
        async with http_client(app) as client:

            async def post(path: str, body: bytes, headers: Mapping[str, str]) -> str:
                nonlocal num_sent
                num_sent += 1
                given = {name.encode(): value.encode("utf-8") for name, value in headers.items()}
                response = await asyncio.wait_for(client.post(path, content=body, headers=given), DEADLINE_S)
                check_log(log)
                if num_sent % 20 == 0:
                    assert (await client.post(URL, json=chat())).status_code == 200, (
                        "the next request is not served"
                    )
                if response.status_code == 200:
                    assert "server_error" not in response.text[-1_000:], response.text[-1_000:]
                    return "200"
                return check_refusal(response.status_code, dict(response.headers), response.content)

            yield post


def _headers(rng: random.Random) -> dict[str, str]:
    headers = {"content-type": rng.choice(_TYPES) if rng.random() < 0.05 else "application/json"}
    if rng.random() < 0.05:
        headers |= rng.choice(_HEADERS)
    return headers


@asynccontextmanager
async def _json(path: str, corpus: tuple[dict[str, Any], ...]) -> AsyncIterator[Run]:
    async with _posting() as post:

        async def run(rng: random.Random) -> str:
            given = rng.choice(corpus)
            if rng.random() < 0.75:
                body = json.dumps(changed_json(rng, given), ensure_ascii=rng.random() < 0.5).encode(
                    "utf-8", "surrogatepass"
                )
            else:
                body = changed_bytes(rng, json.dumps(given).encode())
            outcome: str = await post(path, body, _headers(rng))
            return outcome

        yield run


_FILE = tone(num_samples=4_800)
_PICTURE = media("shapes.png")
_NAMES = (
    "file",
    "model",
    "language",
    "prompt",
    "response_format",
    "temperature",
    "stream",
    "include[]",
    "timestamp_granularities[]",
    "n",
    "size",
    "partial_images",
    "guidance_scale",
    "mask",
)
_CHARSETS = (
    "utf-8", "utf-16", "utf-7", "idna", "punycode", "hex", "rot13", "undefined", "unicode_escape",
    "raw_unicode_escape", "mbcs", "no such", "base64", "a\0b", "", "latin-1", "x" * 5_000, "utf_8_sig", "zlib",
    "../x", "é",
)  # fmt: skip
_FORM_INSERTS = (
    b"--b\r\n", b"\r\n--b--\r\n", b"--b", b"\r\n\r\n", b"\n", b"\r", b"content-disposition: form-data",
    b'; name="file"', b"name*=utf-8''x", b"; filename*=idna''\xff", b'filename=""',
    b"content-type: multipart/mixed; boundary=c", b"content-transfer-encoding: base64", b"x: " + b"y" * 20_000, b"\0",
    b"\xff" * 10, b"=?utf-8?q?a?=", b'\\"' * 2_000, b";" * 9_000, b'"', b"x:y\r\n" * 5_000, b"_charset_",
)  # fmt: skip


def _form(rng: random.Random, file_field: str, file: bytes) -> tuple[bytes, str]:
    fields = {file_field: file.decode("latin-1"), "model": "omni", "prompt": "x"}
    for _ in range(rng.randrange(4)):
        fields[rng.choice(_NAMES)] = rng.choice(
            ("0.2", "de", "true", "json", "text", "1e999", "nan", "١", *WORDS)
        )
    parts = []
    for name, text in fields.items():
        file_name = '; filename="a.wav"' if name == file_field else ""
        given = changed_text(rng, name) if rng.random() < 0.02 else name
        data = file if text == fields[file_field] and name == file_field else text.encode()
        parts.append(
            b'--b\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
            % (given.encode(), file_name.encode(), data)
        )
    body = b"".join(parts) + b"--b--\r\n"
    boundary = (
        rng.choice(("b", "b", "b", "b", '"b"', "", "x", "b" * 300, "é", 'b"', "b;b"))
        if rng.random() < 0.1
        else "b"
    )
    media_type = f"multipart/form-data; boundary={boundary}"
    if rng.random() < 0.2:
        media_type += f"; charset={rng.choice(_CHARSETS)}"
    if rng.random() < 0.6:
        # Near the ends, where the parts' headers are.
        cut = min(rng.choice((150, 300)), len(body))
        body = changed_bytes(rng, body[:cut], _FORM_INSERTS) + body[cut:]
    return body, media_type


@asynccontextmanager
async def _forms() -> AsyncIterator[Run]:
    async with _posting() as post:

        async def run(rng: random.Random) -> str:
            path = rng.choice(("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/edits"))
            is_edit = path == "/v1/images/edits"
            body, media_type = _form(rng, *(("image", _PICTURE) if is_edit else ("file", _FILE)))
            headers = {"content-type": rng.choice(_TYPES) if rng.random() < 0.03 else media_type}
            if rng.random() < 0.03:
                headers |= rng.choice(_HEADERS)
            outcome: str = await post(path, body, headers)
            return outcome

        yield run


def _opened(path: str, corpus: tuple[dict[str, Any], ...]) -> AbstractAsyncContextManager[Run]:
    return _json(path, corpus)


CHAT_BODIES = Target(
    "chat bodies",
    f"{len(CHATS)} chat requests with every field",
    partial(_opened, URL, CHATS),
    frozenset({"200", "invalid_json", "invalid_type", "unknown_parameter"}),
    rounds=250,
)
SPEECH_BODIES = Target(
    "speech bodies",
    f"{len(SPEECHES)} speech requests with every field",
    partial(_opened, "/v1/audio/speech", SPEECHES),
    frozenset({"200", "invalid_json", "invalid_type"}),
    rounds=120,
)
IMAGE_BODIES = Target(
    "image bodies",
    f"{len(IMAGES)} image requests with every field",
    partial(_opened, "/v1/images/generations", IMAGES),
    frozenset({"200", "invalid_json", "invalid_type"}),
    rounds=120,
)
FORMS = Target(
    "forms",
    "forms of transcriptions, translations and edits of images with every field",
    _forms,
    frozenset({"200", "invalid_form", "missing_required_parameter"}),
    rounds=200,
)
