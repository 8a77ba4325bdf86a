"""Qwen3-Omni's whole pipeline gives the same answers when memory runs short, after each engine's death, and
with seeds."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from omni_server.offline import OmniOutput
from omni_server.types import OmniRequest, SamplingConfig
from tests.integration.live import LiveOmni, queue_files, spoken
from tests.integration.parity import Expected, expected, qwen3_config, same_speech
from tests.reference.qwen3_cases import QWEN3_CASES
from tests.reference.qwen3_reference import Qwen3Reference

TALKATIVE = ("hello", "count", "hello_chelsie", "three_turns", "media_in_turns", "speech_aiden")
"""Long replies fill the thinker, long speech the talker, and media make rows that cross between them."""
FEW_BLOCKS = {"max_model_len": 512, "engine_args": {"num_gpu_blocks_override": 17}}
"""Of 32 tokens; too few for all requests at once."""
ALL_STEPS = {"capacity": 256}
"""Of the thinker, while the talker stands still."""
AUDIO_ROUNDING = 1e-5
"""A third of a step of 16 bits."""


@pytest.fixture(scope="module")
def wanted(qwen3_reference: Qwen3Reference) -> dict[str, Expected]:
    """What the reference answers."""
    return {name: expected(qwen3_reference, QWEN3_CASES[name]) for name in TALKATIVE}


@pytest.fixture(scope="module")
def cramped(qwen3_checkpoint: Path) -> Iterator[LiveOmni]:
    """Steps are too small for a prompt with media. Engines come back at once when they have died."""
    files = queue_files()
    config = qwen3_config(
        stages={
            "thinker": {"max_num_batched_tokens": 128, **FEW_BLOCKS},
            "talker": {"max_num_batched_tokens": 64, **FEW_BLOCKS},
        },
        queue=ALL_STEPS,
        supervision={"max_backoff_s": 0.0, "hang_timeout_s": None},
    )
    live = LiveOmni(qwen3_checkpoint, config)
    yield live
    live.close()
    assert queue_files() == files


def test_preempted_requests_are_answered_as_the_reference_does(
    cramped: LiveOmni, wanted: dict[str, Expected]
) -> None:
    before = cramped.num_resumed()
    together = cramped.answers_at_once([want.request for want in wanted.values()])
    for answer, want in zip(together, wanted.values(), strict=True):
        same_speech(answer, want)
    resumed = cramped.num_resumed()
    assert resumed["thinker"] > before["thinker"]
    assert resumed["talker"] > before["talker"]
    assert cramped.held_rows() == 0
    assert cramped.row_slots().in_use == 0


def seeded(seed: int) -> list[OmniRequest]:
    """Sampled in both stages, and as long as it takes to overfill the talker."""
    return [
        spoken(
            QWEN3_CASES[name].messages,
            QWEN3_CASES[name].voice,
            thinker=SamplingConfig(temperature=1.0, max_tokens=30, seed=seed + number),
            talker=SamplingConfig(
                temperature=0.9, top_k=50, max_tokens=60, min_tokens=60, seed=seed + number
            ),
        )
        for number, name in enumerate(("hello", "media_in_turns", "three_turns"))
    ]


def numbers(answer: OmniOutput) -> tuple[tuple[int, ...], tuple[int, ...], bytes]:
    """Text, codes and sound."""
    return answer.token_ids, answer.codes, answer.audio.tobytes()


def same_sampled(answers: Sequence[OmniOutput], alone: Sequence[OmniOutput]) -> None:
    for answer, same in zip(answers, alone, strict=True):
        assert (answer.token_ids, answer.codes) == (same.token_ids, same.codes)
        # In a batch of another size, matrix products sum in another order.
        np.testing.assert_allclose(answer.audio, same.audio, rtol=0, atol=AUDIO_ROUNDING)


@pytest.fixture(scope="module")
def alone(cramped: LiveOmni) -> list[OmniOutput]:
    """The answers to `seeded(5)`, one by one."""
    return [cramped.answer(request) for request in seeded(5)]


def test_a_seed_gives_the_same_answer_preempted_and_among_greedy_requests(
    cramped: LiveOmni, wanted: dict[str, Expected], alone: list[OmniOutput]
) -> None:
    before = cramped.num_resumed()["talker"]
    same_sampled(cramped.answers_at_once(seeded(5)), alone)
    assert cramped.num_resumed()["talker"] > before
    greedy = [wanted[name] for name in ("hello", "speech_aiden")]
    together = cramped.answers([*(want.request for want in greedy), *seeded(5)])
    for answer, want in zip(together, greedy, strict=False):
        same_speech(answer, want)
    same_sampled(together[2:], alone)
    other = cramped.answer(seeded(6)[0])
    assert other.token_ids != alone[0].token_ids
    assert other.codes != alone[0].codes


def test_after_a_restart_answers_are_the_references_and_those_of_the_seed(
    cramped: LiveOmni, wanted: dict[str, Expected], alone: list[OmniOutput]
) -> None:
    """The talker is killed in the middle of an answer; the others know of requests that are gone. The other
    stages: tests/faults/test_stage_faults.py."""
    endless = spoken(
        QWEN3_CASES["hello"].messages,
        "Ethan",
        thinker=SamplingConfig(temperature=0.0, max_tokens=400, ignore_eos=True),
        talker=SamplingConfig(temperature=0.0, max_tokens=400, ignore_eos=True),
    )
    cramped.kill_while_speaking("talker", endless)
    names = ("media_in_turns", "three_turns")
    together = cramped.answers([wanted[name].request for name in names])
    for answer, name in zip(together, names, strict=True):
        same_speech(answer, wanted[name])
    assert numbers(cramped.answer(seeded(5)[0])) == numbers(alone[0])
    assert cramped.held_rows() == 0
    assert cramped.row_slots().in_use == 0
