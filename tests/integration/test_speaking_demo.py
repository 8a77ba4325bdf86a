"""The speaking demo has trained weights: it is right, equals the reference, and its windows are close to one
pass."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.cli.model_flags import speaking_demo
from omni_server.verify.compare import signal_to_noise_db
from tests.integration.live import LiveOmni, demo_config
from tests.integration.parity import expected, same_tokens
from tests.reference.cases import Case, ask
from tests.reference.reference import Reference
from tests.unit.api.clients import chat, error_of, http_client

STREAMED_SNR_DB = 30.0

SAID = {
    "What are you?": "I am a tiny demo model. I answer simple questions, and I say the answers aloud.",
    "Count to ten.": "One, two, three, four, five, six, seven, eight, nine, ten.",
    "How do I stream?": "Set stream to true, and text and sound arrive in small pieces.",
    "Who won the match?": "I am only a tiny demo, so I do not know that. Ask me what I can do.",
}
SPOKEN = {
    question: Case(question, ask(question), voice, thinker_max_tokens=60, talker_max_tokens=700)
    for question, voice in zip(SAID, ("Chelsie", "Ethan", "Chelsie", "Ethan"), strict=True)
}
"""Whole answers."""


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return speaking_demo()


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def streaming(checkpoint: Path) -> Iterator[LiveOmni]:
    live = LiveOmni(checkpoint, demo_config())
    yield live
    live.close()


@pytest.mark.parametrize("name", SPOKEN)
def test_streamed_audio_is_close_to_one_pass_over_the_utterance(
    name: str, reference: Reference, streaming: LiveOmni
) -> None:
    wanted = expected(reference, SPOKEN[name])
    answer = streaming.answer(wanted.request)
    assert answer.text == SAID[name]
    same_tokens(answer, wanted)
    snr = signal_to_noise_db(wanted.result.waveform, answer.audio)
    assert snr > STREAMED_SNR_DB, f"{snr:.1f} dB over {len(answer.codes)} codes"


# -- prompts as they are

SYSTEM = "You are a helpful assistant."
TEMPLATE = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def post(live: LiveOmni, path: str, body: dict[str, Any]) -> httpx2.Response:
    """The API in this process, with the engines of `live`."""

    async def answer() -> httpx2.Response:
        app = create_app(ServerState(live.omni), ApiConfig())
        async with http_client(app) as client:
            return await client.post(path, json=body)

    return live.run(answer())


@pytest.mark.parametrize("question", SAID)
def test_a_prompt_that_is_a_rendered_chat_is_continued_as_the_chat_is(
    question: str, streaming: LiveOmni
) -> None:
    name = streaming.omni.model_info.name
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    fields = {"model": name, "temperature": 0, "max_tokens": 60}
    asked = post(streaming, "/v1/chat/completions", fields | {"messages": messages}).json()
    text = TEMPLATE.format(SYSTEM, question)
    tokens = post(streaming, "/tokenize", {"prompt": text}).json()["tokens"]
    assert post(streaming, "/tokenize", {"messages": messages}).json()["tokens"] == tokens
    answer = post(streaming, "/v1/completions", fields | {"prompt": [text, text], "logprobs": 2}).json()
    of_ids = post(streaming, "/v1/completions", fields | {"prompt": tokens}).json()
    said = asked["choices"][0]["message"]["content"]
    assert said == SAID[question]
    assert [choice["text"] for choice in answer["choices"] + of_ids["choices"]] == [said] * 3
    assert of_ids["usage"]["prompt_tokens"] == asked["usage"]["prompt_tokens"] == len(tokens)
    assert answer["usage"]["prompt_tokens"] == 2 * len(tokens)
    shown = answer["choices"][0]["logprobs"]
    assert all(
        said.startswith(token, at) for token, at in zip(shown["tokens"], shown["text_offset"], strict=True)
    )


@pytest.mark.parametrize(
    "text", ["", "Hello, wörld 👋🏽\u2028!", TEMPLATE.format("a", "<|AUDIO|>"), "a b " * 10_000]
)
def test_tokenized_text_is_detokenized_to_itself(text: str, streaming: LiveOmni) -> None:
    """Special tokens too, and text that is longer than the context."""
    tokenized = post(streaming, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert tokenized["max_model_len"] == streaming.omni.model_info.max_model_len
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
    if text:
        assert post(streaming, "/detokenize", {"tokens": tokenized["tokens"]}).json() == {"prompt": text}


def test_tokens_that_the_model_cannot_read_as_text_are_refused(streaming: LiveOmni) -> None:
    tokens: list[int] = post(streaming, "/tokenize", {"prompt": "Hi <|AUDIO|><|IMAGE|>"}).json()["tokens"]
    name = streaming.omni.model_info.name
    for prompt in (tokens, "Hi <|VIDEO|>", "Hi" * 10_000, [1] * 10_000, [10**9]):
        refused = post(streaming, "/v1/completions", {"model": name, "prompt": prompt})
        assert error_of(refused)["param"] == "prompt"
    assert error_of(post(streaming, "/detokenize", {"tokens": [10**9]}))["param"] == "tokens"
    assert post(streaming, "/v1/chat/completions", chat("What are you?", model=name)).status_code == 200
