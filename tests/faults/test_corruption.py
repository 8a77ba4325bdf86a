"""Corrupt data of one request, made by the real engines or on the way between them, while others run beside
it.

Each case: the victim is told which stage and what, in JSON or in its stream; it is counted; the others'
answers are those that they get alone; nothing is left behind, and the victim's request is answered when asked
again.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import yaml

from tests.faults.corrupting_family import VICTIM_LENGTH, VICTIM_VOICE, order_to_spoil
from tests.faults.orders import withdraw
from tests.faults.supervised_server import ANSWER_TIMEOUT_S, SupervisedServer, samples
from tests.integration.server_process import MODEL, ROOT
from tests.integration.test_server import STREAM, answer_to, outcome, spoken, stream_of, written
from tests.unit.api.clients import URL, error_of
from tests.unit.api.schema import check_error

LONG = "Tell me more of it. " * 60
TALK: dict[str, Any] = {
    "stage_sampling": {"talker": {"temperature": 0, "max_tokens": 40, "ignore_eos": True}}
}
SPEECH = spoken(LONG, voice=VICTIM_VOICE, max_tokens=8, ignore_eos=True, **TALK)
TEXT = written(LONG, max_tokens=8, ignore_eos=True)
OTHERS = (
    spoken(max_tokens=10, ignore_eos=True, **TALK),
    spoken("What is this?", max_tokens=6, ignore_eos=True, **TALK),
    written(max_tokens=12, ignore_eos=True),
)


@pytest.fixture(scope="module")
def server(
    checkpoint: Path, orders: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SupervisedServer]:
    """No fault of this module may end a stage: one restart would end the server."""
    folder = tmp_path_factory.mktemp("corrupting")
    config = yaml.safe_load((ROOT / "configs" / "qwen2_5_omni.demo-cpu.yaml").read_text())
    config["model_family"] = "tests.faults.corrupting_family:FAMILY"
    config["edges"][1]["function"] = "tests.faults.corrupting_family:CorruptingCodecEdge"
    for stage in config["stages"].values():
        stage["engine_args"]["worker_extension_cls"] = "tests.faults.corrupting_engine_side.WorkerExtension"
    config["supervision"] = {"max_restarts": 0}
    path = folder / "stages.yaml"
    path.write_text(yaml.safe_dump(config))
    process = SupervisedServer(checkpoint, folder / "log.txt", "--stage-config", str(path))
    try:
        yield process
    finally:
        exit_code = process.terminate()
    assert exit_code == 0, process.log
    process.wait_until_nothing_is_left()


@pytest.fixture(scope="module")
def client(server: SupervisedServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=ANSWER_TIMEOUT_S) as client:
        yield client


@dataclass(frozen=True)
class Alone:
    """Answers while nothing else runs, and what is taken then."""

    speech: tuple[str, bytes]
    text: tuple[str, bytes]
    others: list[tuple[str, bytes]]
    baseline: dict[str, float]


@pytest.fixture(scope="module")
def alone(server: SupervisedServer, client: httpx2.Client) -> Alone:
    speech = answer_to(client, SPEECH)
    assert speech["usage"]["prompt_tokens"] > VICTIM_LENGTH
    others = [answer_to(client, body) for body in OTHERS]
    for other in others:
        tokens = other["usage"]["total_tokens"]
        assert tokens < VICTIM_LENGTH, "it would be a victim, too"
    text = outcome(answer_to(client, TEXT))
    server.wait_until_idle()
    return Alone(outcome(speech), text, [outcome(other) for other in others], server.baseline(client))


def counted(client: httpx2.Client) -> dict[str, float]:
    """How many requests ended because of corrupt data, by kind and stage; without zeros."""
    return {
        name.removeprefix("omni_corrupt_data_total "): value
        for name, value in samples(client).items()
        if name.startswith("omni_corrupt_data_total") and value
    }


CASES = [
    # What is spoiled where, in an answer by voice or in text; the stage and the kind that are told.
    ("thinker", "NaN at the end of the prompt", TEXT, "thinker", "logits"),
    ("thinker", "NaN while decoding", TEXT, "thinker", "logits"),
    ("thinker", "infinity within the prompt", SPEECH, "thinker", "rows"),
    ("thinker", "NaN while decoding", SPEECH, "thinker", "rows"),
    ("rows", "lost", SPEECH, "talker", "row_sequence"),
    ("rows", "twice", SPEECH, "talker", "row_sequence"),
    ("talker", "NaN at the end of the prompt", SPEECH, "talker", "logits"),
    ("talker", "NaN while decoding", SPEECH, "talker", "logits"),
    ("windows", "lost", SPEECH, "code2wav", "window_sequence"),
    ("windows", "twice", SPEECH, "code2wav", "window_sequence"),
    ("windows", "the first again", SPEECH, "code2wav", "window_sequence"),
    ("windows", "unknown code", SPEECH, "code2wav", "codes"),
    ("code2wav", "NaN", SPEECH, "code2wav", "samples"),
    ("code2wav", "too loud", SPEECH, "code2wav", "samples"),
    ("code2wav", "silence", SPEECH, "code2wav", "flat"),
    ("code2wav", "clipped", SPEECH, "code2wav", "clipped"),
    ("code2wav", "cut", SPEECH, "code2wav", "shape"),
    ("code2wav", "stereo", SPEECH, "code2wav", "shape"),
    ("code2wav", "whole numbers", SPEECH, "code2wav", "shape"),
]


@pytest.mark.parametrize(
    ("place", "what", "body", "stage", "kind"), CASES, ids=[f"{place}, {what}" for place, what, *_ in CASES]
)
def test_corrupt_data_ends_its_request_and_no_other(
    server: SupervisedServer,
    client: httpx2.Client,
    alone: Alone,
    orders: Path,
    place: str,
    what: str,
    body: Any,
    stage: str,
    kind: str,
) -> None:
    before, log_length = counted(client), len(server.log)
    order_to_spoil(orders, place, what)
    try:
        victim, others = all_at_once(
            server, body, is_streamed=CASES.index((place, what, body, stage, kind)) % 2 == 1
        )
    finally:
        withdraw(orders)
    told = f"stage '{stage}': corrupt data ({kind}): "
    assert victim["error"]["code"] == "corrupt_data"
    assert victim["error"]["message"].startswith(told)
    check_same(others, alone.others)
    label = f"{kind} {stage}"
    assert counted(client) == before | {label: before.get(label, 0) + 1}
    lines = [line for line in server.log[log_length:].splitlines() if told in line and "ERROR" in line]
    assert len(lines) == 1, server.log[log_length:]
    assert outcome(answer_to(client, body)) == (alone.text if body is TEXT else alone.speech)
    server.wait_for_baseline(client, alone.baseline)


def test_exception_about_one_window_ends_its_request_and_no_other(
    server: SupervisedServer, client: httpx2.Client, alone: Alone, orders: Path
) -> None:
    before = counted(client)
    order_to_spoil(orders, "code2wav", "raises")
    try:
        victim, others = all_at_once(server, SPEECH, is_streamed=False)
    finally:
        withdraw(orders)
    assert victim["error"]["message"] == "stage 'code2wav': RuntimeError: told to fail"
    check_same(others, alone.others)
    assert counted(client) == before
    assert outcome(answer_to(client, SPEECH)) == alone.speech
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
    server: SupervisedServer, victim: Any, *, is_streamed: bool
) -> tuple[dict[str, Any], list[tuple[str, bytes]]]:
    """The victim's error, and what the others got."""

    def posted(body: Any) -> httpx2.Response:
        with server.client() as own:
            return own.post(URL, json=body)

    def answered(body: Any) -> tuple[str, bytes]:
        with server.client() as own:
            return outcome(answer_to(own, body))

    with ThreadPoolExecutor(1 + len(OTHERS)) as threads:
        failing = threads.submit(posted, victim | STREAM if is_streamed else victim)
        others = [result.result() for result in [threads.submit(answered, body) for body in OTHERS]]
    response = failing.result()
    if not is_streamed or response.status_code != 200:
        error_of(response, 500)
        return response.json(), others
    last = re.findall(r"^data: (.*)$", response.text, re.MULTILINE)[-1]
    error = httpx2.Response(200, text=last).json()
    check_error(error)
    return error, others


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


def test_spoken_reply_without_anything_to_speak_is_a_valid_answer(
    server: SupervisedServer, client: httpx2.Client, alone: Alone
) -> None:
    """The only token has no row, and nothing is spoken for it."""
    check_empty_speech(client, spoken(max_tokens=1))
    server.wait_for_baseline(client, alone.baseline)


def test_speech_that_ends_at_once_is_a_valid_answer(
    server: SupervisedServer, client: httpx2.Client, alone: Alone, orders: Path
) -> None:
    order_to_spoil(orders, "talker", "ends at once")
    try:
        check_empty_speech(client, spoken())
        read_aloud = {"model": MODEL, "input": "Hello", "voice": "Chelsie", "response_format": "pcm"}
        response = client.post("/v1/audio/speech", json=read_aloud)
    finally:
        withdraw(orders)
    assert (response.status_code, response.content) == (200, b"")
    server.wait_for_baseline(client, alone.baseline)
