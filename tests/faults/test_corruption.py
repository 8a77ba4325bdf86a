"""Corrupt data of one request, made by the real engines or on the way between them, while others run beside
it.

Each case: the victim is told which stage and what, in JSON or in its stream; it is counted; the others'
answers are those that they get alone; nothing is left behind, and the victim's request is answered when asked
again.
"""

import json
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
from tests.integration.test_server import IMAGE_PART, STREAM, answer_to, outcome, spoken, stream_of, written
from tests.omni_families import QWEN3_OMNI
from tests.unit.api.clients import URL, error_of
from tests.unit.api.schema import check_error

LONG = "Tell me more of it. " * 60
TALK: dict[str, Any] = {
    "stage_sampling": {"talker": {"temperature": 0, "max_tokens": 26, "ignore_eos": True}}
}
SPEECH = spoken(LONG, voice=VICTIM_VOICE, max_tokens=8, ignore_eos=True, **TALK)
TEXT = written(LONG, max_tokens=8, ignore_eos=True)
# With rows, which are those of media.
PICTURE = spoken(
    [{"type": "text", "text": LONG}, IMAGE_PART], voice=VICTIM_VOICE, max_tokens=8, ignore_eos=True, **TALK
)
OTHERS = (
    spoken(max_tokens=10, ignore_eos=True, **TALK),
    spoken("What is this?", max_tokens=6, ignore_eos=True, **TALK),
    written(max_tokens=12, ignore_eos=True),
)


@pytest.fixture(scope="module")
def server(
    qwen3_checkpoint: Path, orders: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SupervisedServer]:
    """No fault of this module may end a stage: one restart would end the server."""
    folder = tmp_path_factory.mktemp("corrupting")
    config = yaml.safe_load((ROOT / QWEN3_OMNI.stage_config).read_text())
    config["model_family"] = "tests.faults.corrupting_family:qwen3_omni"
    for stage in config["stages"].values():
        stage["engine_args"]["worker_extension_cls"] = "tests.faults.corrupting_engine_side.WorkerExtension"
    config["supervision"] = {"max_restarts": 0}
    path = folder / "stages.yaml"
    path.write_text(yaml.safe_dump(config))
    with SupervisedServer(qwen3_checkpoint, folder / "log.txt", "--stage-config", str(path)) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: SupervisedServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=ANSWER_TIMEOUT_S) as client:
        yield client


@dataclass(frozen=True)
class Alone:
    """Answers while nothing else runs, and what is taken then."""

    victims: dict[str, tuple[str, bytes]]
    """By the victim's request, as JSON."""
    others: list[tuple[str, bytes]]
    baseline: dict[str, float]

    def of(self, victim: Any) -> tuple[str, bytes]:
        return self.victims[json.dumps(victim)]


@pytest.fixture(scope="module")
def alone(server: SupervisedServer, client: httpx2.Client) -> Alone:
    victims = {json.dumps(body): answer_to(client, body) for body in (SPEECH, TEXT, PICTURE)}
    for victim in victims.values():
        assert victim["usage"]["prompt_tokens"] > VICTIM_LENGTH
    others = [answer_to(client, body) for body in OTHERS]
    for other in others:
        tokens = other["usage"]["total_tokens"]
        assert tokens < VICTIM_LENGTH, "it would be a victim, too"
    server.wait_until_idle()
    return Alone(
        {body: outcome(answer) for body, answer in victims.items()},
        [outcome(other) for other in others],
        server.baseline(client),
    )


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
    def name(self) -> str:
        return f"{self.place}, {self.what}"


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
)
"""What else the server finds wrong with windows and sound is in tests/unit/orchestrator/test_request_end.py."""


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_corrupt_data_ends_its_request_and_no_other(
    case: Case, server: SupervisedServer, client: httpx2.Client, alone: Alone, orders: Path
) -> None:
    before, log_length = counted(client), len(server.log)
    order_to_spoil(orders, case.place, case.what)
    try:
        victim, others = all_at_once(server, case.body, is_streamed=case.is_streamed)
    finally:
        withdraw(orders)
    told = f"stage '{case.stage}': corrupt data ({case.kind}): "
    assert victim["error"]["code"] == "corrupt_data"
    assert victim["error"]["message"].startswith(told)
    check_same(others, alone.others)
    label = f"{case.kind} {case.stage}"
    assert counted(client) == before | {label: before.get(label, 0) + 1}
    lines = [line for line in server.log[log_length:].splitlines() if told in line and "ERROR" in line]
    assert len(lines) == 1, server.log[log_length:]
    assert outcome(answer_to(client, case.body)) == alone.of(case.body)
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
    assert outcome(answer_to(client, SPEECH)) == alone.of(SPEECH)
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
