"""Corrupt data of one request, made by the real engines or on the way between them, while others run beside
it.

Each case: the victim is told which stage and what, in JSON or in its stream; it is counted; the others'
answers are those that they get alone; nothing is left behind, and the victim's request is answered when asked
again.
"""

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import yaml

from tests.faults.corrupting_family import VICTIM_LENGTH, VICTIM_VOICES, order_to_spoil
from tests.faults.orders import withdraw
from tests.faults.supervised_server import ANSWER_TIMEOUT_S, SupervisedServer, demo_config, samples
from tests.integration.server_process import MODEL
from tests.integration.test_server import IMAGE_PART, STREAM, answer_to, outcome, spoken, stream_of, written
from tests.integration.test_server_audio import SPEECH_URL
from tests.omni_families import QWEN3_OMNI, QWEN3_TTS, OmniFamily, for_families
from tests.unit.api.clients import URL, error_of
from tests.unit.api.schema import check_error

LONG = "Tell me more of it. " * 60
TALK: dict[str, Any] = {
    "stage_sampling": {"talker": {"temperature": 0, "max_tokens": 26, "ignore_eos": True}}
}
SPEECH = spoken(LONG, voice=VICTIM_VOICES[0], max_tokens=8, ignore_eos=True, **TALK)
TEXT = written(LONG, max_tokens=8, ignore_eos=True)
# With rows, which are those of media.
PICTURE = spoken(
    [{"type": "text", "text": LONG}, IMAGE_PART],
    voice=VICTIM_VOICES[0],
    max_tokens=8,
    ignore_eos=True,
    **TALK,
)
READING = {"model": MODEL, "response_format": "pcm", "seed": 7, "stream": False} | {
    "stage_sampling": {"talker": {"temperature": 0, "min_tokens": 16, "max_tokens": 16}}
}
READ_ALOUD = READING | {"input": LONG, "voice": VICTIM_VOICES[1]}
OTHERS = (
    spoken(max_tokens=10, ignore_eos=True, **TALK),
    spoken("What is this?", max_tokens=6, ignore_eos=True, **TALK),
    written(max_tokens=12, ignore_eos=True),
)


OTHER_READERS = (READING | {"input": "Hello."}, READING | {"input": "What is this?", "voice": "Serena"})


@pytest.fixture(scope="module")
def server(
    family: OmniFamily,
    checkpoints: dict[OmniFamily, Path],
    orders: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SupervisedServer]:
    """No fault of this module may end a stage: one restart would end the server."""
    folder = tmp_path_factory.mktemp("corrupting")
    config = demo_config(family)
    config["model_family"] = f"tests.faults.corrupting_family:{family.name}"
    for stage in config["stages"].values():
        stage["engine_args"]["worker_extension_cls"] = "tests.faults.corrupting_engine_side.WorkerExtension"
    if not family.chats:  # then a text as long as the victim's is no passages
        config["stages"]["talker"]["default_sampling"]["max_tokens"] = 2000
    config["supervision"] = {"max_restarts": 0}
    path = folder / "stages.yaml"
    path.write_text(yaml.safe_dump(config))
    checkpoint, flags = checkpoints[family], ("--stage-config", str(path))
    with SupervisedServer(checkpoint, folder / "log.txt", *flags, has_queue=family.chats) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: SupervisedServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=ANSWER_TIMEOUT_S) as client:
        yield client


@dataclass(frozen=True)
class Alone:
    """Answers while nothing else runs, and what is taken then."""

    answers: dict[str, tuple[str, bytes]]
    """By the request, as JSON."""
    others: list[Any]
    """Requests beside the victim's."""
    baseline: dict[str, float]

    def of(self, body: Any) -> tuple[str, bytes]:
        return self.answers[json.dumps(body)]


@pytest.fixture(scope="module")
def alone(family: OmniFamily, server: SupervisedServer, client: httpx2.Client) -> Alone:
    for body, is_victim in [
        (SPEECH, True),
        (TEXT, True),
        (PICTURE, True),
        *((other, False) for other in OTHERS),
    ]:
        if family.chats:
            usage = answer_to(client, body)["usage"]
            assert (usage["prompt_tokens" if is_victim else "total_tokens"] > VICTIM_LENGTH) == is_victim
    victims, others = ((SPEECH, TEXT, PICTURE), OTHERS) if family.chats else ((READ_ALOUD,), OTHER_READERS)
    answers = {json.dumps(body): answered(client, body) for body in (*victims, *others)}
    server.wait_until_idle()
    return Alone(answers, list(others), server.baseline(client))


def path_of(body: Any) -> str:
    return URL if "messages" in body else SPEECH_URL


def answered(client: httpx2.Client, body: Any) -> tuple[str, bytes]:
    if "messages" in body:
        return outcome(answer_to(client, body))
    response = client.post(SPEECH_URL, json=body)
    assert response.status_code == 200, response.text
    return "", response.content


def counted(client: httpx2.Client) -> dict[str, float]:
    """How many requests ended because of corrupt data, by kind and stage; without zeros."""
    return {
        name.removeprefix("omni_corrupt_data_total "): value
        for name, value in samples(client).items()
        if name.startswith("omni_corrupt_data_total") and value
    }


@dataclass(frozen=True)
class Case:
    place: str
    what: str
    """What is spoiled there."""
    body: Any
    """Of the victim."""
    stage: str
    kind: str
    """What it is told."""
    is_streamed: bool = False
    """The victim's answer."""

    @property
    def family(self) -> OmniFamily:
        return QWEN3_TTS if self.body is READ_ALOUD else QWEN3_OMNI

    @property
    def name(self) -> str:
        name = f"{self.place}, {self.what}"
        return name if self.family is QWEN3_OMNI else f"{self.family.name}: {name}"


CASES = (
    Case("thinker", "NaN at the end of the prompt", TEXT, "thinker", "logits"),
    Case("thinker", "NaN while decoding", SPEECH, "thinker", "logits"),
    Case("thinker", "infinity within the prompt", PICTURE, "thinker", "rows", is_streamed=True),
    Case("rows", "lost", PICTURE, "thinker", "row_sequence"),
    Case("text ids", "lost", SPEECH, "talker", "row_sequence", is_streamed=True),
    Case("text ids", "unknown", SPEECH, "talker", "row_sequence"),
    Case("talker", "NaN while decoding", SPEECH, "talker", "logits"),
    Case("predicted codes", "NaN", SPEECH, "talker", "logits", is_streamed=True),
    Case("predicted codes", "lost", SPEECH, "talker", "shape"),
    Case("windows", "the first again", SPEECH, "code2wav", "window_sequence", is_streamed=True),
    Case("windows", "unknown code", SPEECH, "code2wav", "codes"),
    Case("code2wav", "NaN", SPEECH, "code2wav", "samples", is_streamed=True),
    Case("code2wav", "cut", SPEECH, "code2wav", "shape"),
    Case("code2wav", "silence", SPEECH, "code2wav", "flat", is_streamed=True),
    Case("prompt", "cut", READ_ALOUD, "talker", "row_sequence"),
    Case("prompt", "a row lost", READ_ALOUD, "talker", "row_sequence", is_streamed=True),
    Case("prompt", "unknown id", READ_ALOUD, "talker", "row_sequence"),
    Case("predicted codes", "NaN", READ_ALOUD, "talker", "logits", is_streamed=True),
    Case("windows", "the first again", READ_ALOUD, "code2wav", "window_sequence", is_streamed=True),
)
"""Behind its prompts, Qwen3-TTS has Qwen3-Omni's stages. What else the server finds wrong with windows and
sound is in tests/unit/orchestrator/test_request_end.py."""


@pytest.mark.parametrize(
    ("family", "case"),
    [(case.family, case) for case in CASES],
    ids=[case.name for case in CASES],
    indirect=["family"],
    scope="module",
)
def test_corrupt_data_ends_its_request_and_no_other(
    family: OmniFamily,
    case: Case,
    server: SupervisedServer,
    client: httpx2.Client,
    alone: Alone,
    orders: Path,
) -> None:
    before, log_length = counted(client), len(server.log)
    order_to_spoil(orders, case.place, case.what)
    try:
        victim, others = all_at_once(server, case.body, alone.others, is_streamed=case.is_streamed)
    finally:
        withdraw(orders)
    told = f"stage '{case.stage}': corrupt data ({case.kind}): "
    assert victim["error"]["code"] == "corrupt_data"
    assert victim["error"]["message"].startswith(told)
    check_same(others, [alone.of(body) for body in alone.others])
    label = f"{case.kind} {case.stage}"
    assert counted(client) == before | {label: before.get(label, 0) + 1}
    lines = [line for line in server.log[log_length:].splitlines() if told in line and "ERROR" in line]
    assert len(lines) == 1, server.log[log_length:]
    assert answered(client, case.body) == alone.of(case.body)
    server.wait_for_baseline(client, alone.baseline)


@for_families(QWEN3_OMNI)
def test_exception_about_one_window_ends_its_request_and_no_other(
    server: SupervisedServer, client: httpx2.Client, alone: Alone, orders: Path
) -> None:
    before = counted(client)
    order_to_spoil(orders, "code2wav", "raises")
    try:
        victim, others = all_at_once(server, SPEECH, alone.others, is_streamed=False)
    finally:
        withdraw(orders)
    assert victim["error"]["message"] == "stage 'code2wav': RuntimeError: told to fail"
    check_same(others, [alone.of(body) for body in alone.others])
    assert counted(client) == before
    assert answered(client, SPEECH) == alone.of(SPEECH)
    server.wait_for_baseline(client, alone.baseline)


def check_same(answers: list[tuple[str, bytes]], alone: list[tuple[str, bytes]]) -> None:
    """Text to the letter. Sound to one step of 16 bits: code2wav's sums depend on how many windows it
    computes at once, with or without a victim among them."""
    assert [text for text, _ in answers] == [text for text, _ in alone]
    for (_, sound), (_, expected) in zip(answers, alone, strict=True):
        samples_of, wanted = (np.frombuffer(data, np.int16).astype(np.int32) for data in (sound, expected))
        assert samples_of.shape == wanted.shape
        assert np.abs(samples_of - wanted).max(initial=0) <= 1


def all_at_once(
    server: SupervisedServer, victim: Any, others: Sequence[Any], *, is_streamed: bool
) -> tuple[dict[str, Any], list[tuple[str, bytes]]]:
    """The victim's error, and what the others got."""

    def posted(body: Any) -> httpx2.Response:
        with server.client() as own:
            return own.post(path_of(body), json=body)

    def heard(body: Any) -> tuple[str, bytes]:
        with server.client() as own:
            return answered(own, body)

    if is_streamed:
        victim = victim | (STREAM if "messages" in victim else {"stream_format": "sse"})
    with ThreadPoolExecutor(1 + len(others)) as threads:
        failing = threads.submit(posted, victim)
        answers = [result.result() for result in [threads.submit(heard, body) for body in others]]
    response = failing.result()
    if not is_streamed or response.status_code != 200:
        error_of(response, 500)
        return response.json(), answers
    last = re.findall(r"^data: (.*)$", response.text, re.MULTILINE)[-1]
    error = httpx2.Response(200, text=last).json()
    check_error(error)
    return error, answers


# -- an empty spoken reply is no corrupt one


def check_empty_speech(client: httpx2.Client, body: Any) -> None:
    """In one piece and streamed."""
    before = counted(client)
    completion = answer_to(client, body)
    assert completion["choices"][0]["message"]["audio"]["data"] == ""
    assert completion["usage"]["completion_tokens_details"]["audio_tokens"] == 0
    streamed = stream_of(client, body)
    assert streamed.data == b""
    assert streamed.transcript == completion["choices"][0]["message"]["audio"]["transcript"]
    assert counted(client) == before


@for_families(QWEN3_OMNI)
def test_speech_that_ends_at_once_is_a_valid_answer(
    server: SupervisedServer, client: httpx2.Client, alone: Alone, orders: Path
) -> None:
    order_to_spoil(orders, "talker", "ends at once")
    try:
        check_empty_speech(client, spoken())
        read_aloud = {"model": MODEL, "input": "Hello", "voice": "Chelsie", "response_format": "pcm"}
        response = client.post(SPEECH_URL, json=read_aloud)
    finally:
        withdraw(orders)
    assert (response.status_code, response.content) == (200, b"")
    server.wait_for_baseline(client, alone.baseline)
