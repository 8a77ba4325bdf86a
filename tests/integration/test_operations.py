"""Metrics and log of the real server process, with real engines behind them."""

import json
import re
from collections.abc import Callable

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.server_process import MODEL, ServerProcess, wait_until
from tests.integration.test_server import (
    ENDLESS,
    IMAGE_PART,
    SPEECH_PART,
    STREAM,
    answer_to,
    num_tokens,
    spoken,
    written,
)
from tests.integration.test_server_audio import SPEECH_URL, speech
from tests.omni_families import QWEN2_5_OMNI, QWEN3_TTS, OmniFamily, for_each_family, for_families
from tests.unit.api.clients import URL
from tests.unit.api.sse_validator import parse_frames

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(client: httpx2.Client) -> Values:
    response = client.get("/metrics")
    assert (response.status_code, response.history) == (200, [])
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def of_stage(values: Values, name: str, stage: str, **labels: str) -> float:
    return values[
        f"vllm:{name}", frozenset({"engine": "0", "model_name": MODEL, "stage": stage, **labels}.items())
    ]


def levels(values: Values) -> dict[str, float]:
    """All gauges that requests move."""
    moved = (
        "vllm:num_requests",
        "vllm:kv_cache",
        "omni_active",
        "omni_shared_memory_slots_in_use",
        "omni_requests_in_flight",
    )
    return {
        f"{name}{sorted(labels)}": value
        for (name, labels), value in values.items()
        if name.startswith((*moved, "omni_requests_running")) and name != "omni_requests_in_flight_limit"
    }


def wait_until_idle(client: httpx2.Client, family: OmniFamily = QWEN2_5_OMNI) -> None:
    num_stages, num_queues = len(family.stages), int(family.chats)
    assert len(levels(scraped(client))) == (num_stages - 1) * 3 + num_stages + num_queues + 2
    wait_until(
        lambda: set(levels(scraped(client)).values()) == {0.0}, 30, lambda: str(levels(scraped(client)))
    )


@for_each_family
def test_spoken_answer_is_counted_exactly_in_every_stage(family: OmniFamily, client: httpx2.Client) -> None:
    wait_until_idle(client)
    before = scraped(client)
    completion = answer_to(client, spoken())
    wait_until_idle(client)
    after = scraped(client)

    def grown(read: Callable[[Values], float]) -> float:
        return read(after) - read(before)

    text_tokens, codec_tokens = num_tokens(completion)
    prompt_tokens = completion["usage"]["prompt_tokens"]
    assert grown(lambda values: of_stage(values, "prompt_tokens_total", "thinker")) == prompt_tokens
    assert grown(lambda values: of_stage(values, "generation_tokens_total", "thinker")) == text_tokens
    # The talker's end token, where it came to one, is no sound.
    assert grown(lambda values: of_stage(values, "generation_tokens_total", "talker")) - codec_tokens in (
        0,
        1,
    )
    assert grown(lambda values: of_stage(values, "time_to_first_token_seconds_count", "thinker")) == 1
    for stage in ("thinker", "talker"):
        ended = "e2e_request_latency_seconds_count"
        assert of_stage(after, ended, stage) - of_stage(before, ended, stage) == 1
    ok = (
        "omni_requests_total",
        frozenset({("outcome", "ok"), ("reason", completion["choices"][0]["finish_reason"])}),
    )
    assert after[ok] - before.get(ok, 0.0) == 1
    assert grown(lambda values: values["omni_time_to_first_audio_seconds_count", frozenset()]) == 1
    assert grown(lambda values: values["omni_audio_output_seconds_total", frozenset()]) == pytest.approx(
        family.num_samples(codec_tokens) / 24_000
    )


@for_families(QWEN3_TTS)
def test_speech_of_a_model_that_only_reads_aloud_is_counted_exactly(
    family: OmniFamily, client: httpx2.Client
) -> None:
    wait_until_idle(client, family)
    before = scraped(client)
    response = client.post(SPEECH_URL, json=speech(response_format="pcm", stream_format="sse"))
    usage = json.loads(parse_frames(response.text)[-1])["usage"]
    wait_until_idle(client, family)
    after = scraped(client)

    def grown(read: Callable[[Values], float]) -> float:
        return read(after) - read(before)

    codes = usage["output_tokens"]
    assert grown(lambda values: of_stage(values, "generation_tokens_total", "talker")) - codes in (0, 1)
    ended = "e2e_request_latency_seconds_count"
    assert grown(lambda values: of_stage(values, ended, "talker")) == 1
    ok = ("omni_requests_total", frozenset({("outcome", "ok"), ("reason", "length")}))
    assert after[ok] - before.get(ok, 0.0) == 1
    assert grown(lambda values: values["omni_time_to_first_audio_seconds_count", frozenset()]) == 1
    assert grown(lambda values: values["omni_audio_output_seconds_total", frozenset()]) == pytest.approx(
        family.num_samples(codes) / 24_000
    )


def test_levels_return_to_zero_when_a_client_leaves(client: httpx2.Client) -> None:
    before = scraped(client)
    with client.stream("POST", URL, json=spoken(**(STREAM | ENDLESS))) as response:
        lines = response.iter_lines()
        for _ in range(40):
            next(lines)
        busy = levels(scraped(client))
    assert sum(busy.values()) >= 3  # at least: in flight, running, and in the thinker
    wait_until_idle(client)
    after = scraped(client)
    aborted = ("omni_requests_total", frozenset({("outcome", "aborted"), ("reason", "")}))
    assert after[aborted] - before.get(aborted, 0.0) == 1
    ended = [
        of_stage(values, "request_success_total", "thinker", finished_reason="abort")
        for values in (before, after)
    ]
    assert ended[1] - ended[0] == 1


def test_log_has_one_line_for_each_request_and_nothing_of_what_was_said(
    server: ServerProcess, client: httpx2.Client
) -> None:
    question = "Which zebra parade is that?"
    content = [{"type": "text", "text": question}, SPEECH_PART, IMAGE_PART]
    response = client.post(URL, json=spoken(content), headers={"X-Request-Id": "in-the-log-1"})
    assert response.status_code == 200
    client.post(
        URL, json=written(question, stream=True), headers={"X-Request-Id": "in-the-log-2"}
    ).raise_for_status()
    wait_until(lambda: "request_id=in-the-log-2" in server.log, 10)
    first, second = (
        [line for line in server.log.splitlines() if f"in-the-log-{number}" in line] for number in (1, 2)
    )
    assert (len(first), len(second)) == (1, 1)
    for field in (
        "status=200",
        "outcome=ok",
        "prompt_audio=",
        "prompt_image=",
        "codec_tokens=",
        "audio_s=",
        "code2wav_s=",
    ):
        assert field in first[0]
    # Nor did any other request of this run leave something behind.
    assert "zebra parade" not in server.log
    assert not re.search(r"[A-Za-z0-9+/]{100}", server.log)
