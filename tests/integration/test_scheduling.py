"""Results do not depend on what else runs, on how prompts are cut, or on memory running short."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from omni_server.offline import collect
from omni_server.types import OmniRequest, SamplingConfig
from tests.integration.live import LiveOmni, demo_config, spoken, written
from tests.integration.parity import Expected, expected, same_tokens
from tests.reference.cases import CASES
from tests.reference.reference import Reference

MIXED = ("hello", "two_turns_ethan", "speech", "image", "video", "mixed", "count", "tell")


@pytest.fixture(scope="module")
def wanted(reference: Reference) -> list[Expected]:
    return [expected(reference, CASES[name]) for name in MIXED]


@pytest.fixture(scope="module")
def talkative(reference: Reference) -> list[Expected]:
    """Short prompts with long replies: what overfills the talker."""
    names = ("hello", "count", "two_turns", "long_reply", "hello_ethan", "two_turns_ethan", "tell")
    return [expected(reference, CASES[name]) for name in names]


@pytest.fixture(scope="module")
def cramped(checkpoint: Path) -> Iterator[LiveOmni]:
    """Too few KV blocks for eight requests at once, and steps too small for a prompt with media."""
    config = demo_config(
        stages={
            "thinker": {
                "max_model_len": 768,
                "max_num_batched_tokens": 128,
                "engine_args": {"num_gpu_blocks_override": 25, "mm_processor_cache_gb": 0},
            },
            "talker": {
                "max_model_len": 768,
                "max_num_batched_tokens": 64,
                "engine_args": {"num_gpu_blocks_override": 25},
            },
        }
    )
    live = LiveOmni(checkpoint, config)
    yield live
    live.close()


def test_eight_mixed_requests_at_once_with_preemption_and_chunked_prefill(
    cramped: LiveOmni, wanted: list[Expected], talkative: list[Expected]
) -> None:
    for group in (wanted, talkative, wanted):
        answers = cramped.answers_at_once([w.request for w in group], ["thinker"])
        for answer, want in zip(answers, group, strict=True):
            same_tokens(answer, want)
    resumed = cramped.num_resumed()
    assert resumed["thinker"] > 0
    assert resumed["talker"] > 0
    assert cramped.held_rows() == 0
    assert cramped.row_slots().in_use == 0


def test_a_caller_with_one_request_does_not_wait_for_all_those_of_another(
    cramped: LiveOmni, wanted: list[Expected]
) -> None:
    ended: list[str] = []

    async def answer(caller: str) -> None:
        await collect(cramped.omni, replace(written(wanted[0].case.messages), caller=caller))
        ended.append(caller)

    async def together() -> None:
        await asyncio.gather(*(answer("busy") for _ in range(8)))
        async with asyncio.TaskGroup() as group, cramped.stopped("thinker", {"thinker": 25}):
            for caller in ["busy"] * 24 + ["patient"]:
                group.create_task(answer(caller))

    cramped.run(together())
    assert ended.index("patient") < 24


def test_text_only_requests_never_reach_the_talker(cramped: LiveOmni, wanted: list[Expected]) -> None:
    before = cramped.row_slots().published
    answer = cramped.answer(written(wanted[0].case.messages))
    assert answer.token_ids == wanted[0].result.text_ids[:40]
    assert answer.codes == ()
    assert not len(answer.audio)
    assert cramped.row_slots().published == before


def test_seeds_give_the_same_tokens_however_prompts_are_cut(
    cramped: LiveOmni, wanted: list[Expected]
) -> None:
    """A piece of a prompt samples a token that is thrown away, and a seed must not move on with it. On CPU,
    vLLM would end the engine there."""

    def requests() -> list[OmniRequest]:
        return [
            spoken(
                want.case.messages,
                thinker=SamplingConfig(temperature=1.0, max_tokens=20, seed=number),
                talker=SamplingConfig(temperature=1.0, max_tokens=60, min_tokens=20, seed=number),
            )
            for number, want in enumerate(wanted)
        ]

    alone = [cramped.answer(request) for request in requests()]
    together = cramped.answers(requests())
    assert [(answer.token_ids, answer.codes) for answer in together] == [
        (answer.token_ids, answer.codes) for answer in alone
    ]
