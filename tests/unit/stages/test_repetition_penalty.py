"""The penalty kept on the device equals vLLM's own, which is computed from lists of ids."""

import numpy as np
import pytest
import torch
from vllm.v1.sample.ops.penalties import apply_all_penalties

from stages.runtime.ar_runner_v1 import RepetitionPenalty
from stages.runtime.stage_step import StepBatch

VOCAB = 40


def batch(*parts: tuple[str, int, int]) -> StepBatch:
    """(request id, first position, count) of each request, one behind the other."""
    counts = np.array([count for _, _, count in parts], np.int32)
    return StepBatch(
        [request_id for request_id, _, _ in parts],
        np.array([first for _, first, _ in parts], np.int32),
        counts,
        (np.cumsum(counts) - counts).astype(np.int32),
    )


def logits(num_requests: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_requests, VOCAB, generator=torch.Generator().manual_seed(seed)).to(dtype)


def vllms(given: torch.Tensor, seen: list[tuple[list[int], list[int], float]]) -> torch.Tensor:
    """What vLLM makes of the logits of requests with these (prompt, output, penalty)."""
    longest = max(len(prompt) for prompt, _, _ in seen)
    prompts = torch.tensor([prompt + [VOCAB] * (longest - len(prompt)) for prompt, _, _ in seen])
    nothing = torch.zeros(len(seen))
    penalties = torch.tensor([penalty for _, _, penalty in seen])
    outputs = [output for _, output, _ in seen]
    return apply_all_penalties(given.float().clone(), prompts, nothing, nothing, penalties, outputs)


@pytest.mark.parametrize("seed", range(10))
def test_any_course_of_steps_gives_vllms_logits(seed: int) -> None:
    """Random prompts and penalties, chunked prefill, requests that change places, pause, are computed again
    from the start, end, and new ones in their slots."""
    random = np.random.default_rng(seed)
    penalty = RepetitionPenalty(VOCAB, torch.device("cpu"))
    ids: dict[str, list[int]] = {}
    prompt_length: dict[str, int] = {}
    penalties: dict[str, float] = {}
    position: dict[str, int] = {}
    for number in range(120):
        if len(ids) < 12 and random.random() < 0.4:
            name = f"r{number}"
            prompt_length[name] = int(random.integers(1, 12))
            ids[name] = random.integers(0, VOCAB, prompt_length[name]).tolist()
            penalties[name], position[name] = float(random.choice([1.0, 1.05, 1.3, 0.8])), 0
            penalty.add(name, penalties[name])
        if len(ids) > 3 and random.random() < 0.15:
            name = str(random.choice(list(ids)))
            penalty.remove(name)
            del ids[name]
        chosen = [name for name in random.permutation(list(ids)) if random.random() < 0.8]
        parts = []
        for name in chosen:
            if random.random() < 0.05:
                position[name] = 0  # preempted
            count = min(len(ids[name]) - position[name], int(random.integers(1, 8)))
            parts.append((str(name), position[name], count))
        if not parts:
            continue
        step = batch(*parts)
        penalty.see(
            torch.tensor([token for name, first, n in parts for token in ids[name][first : first + n]]), step
        )
        given = logits(len(parts), number)
        want = vllms(
            given,
            [
                (ids[name][: prompt_length[name]], ids[name][prompt_length[name] :], penalties[name])
                for name, _, _ in parts
            ],
        )
        got = penalty.apply(given.clone(), step)
        for index, (name, first, count) in enumerate(parts):
            position[name] = first + count
            if position[name] == len(ids[name]):  # otherwise vLLM throws the sampled token away
                assert torch.equal(got[index], want[index])
                ids[name].append(int(got[index].argmax()))


def test_logits_of_half_the_width_are_penalised_in_full_precision() -> None:
    penalty = RepetitionPenalty(VOCAB, torch.device("cpu"))
    penalty.add("a", 1.05)
    step = batch(("a", 0, 2))
    penalty.see(torch.tensor([3, 7]), step)
    given = logits(1, 0, torch.bfloat16)
    assert torch.equal(penalty.apply(given.clone(), step), vllms(given, [([3, 7], [], 1.05)]))


def test_without_a_penalty_nothing_is_remembered_and_nothing_changes() -> None:
    penalty = RepetitionPenalty(VOCAB, torch.device("cpu"))
    penalty.add("a", 1.0)
    assert len(penalty) == 0
    step = batch(("a", 0, 1))
    penalty.see(torch.tensor([3]), step)
    given = logits(1, 0)
    assert penalty.apply(given, step) is given


def test_a_request_that_has_ended_holds_nothing() -> None:
    penalty = RepetitionPenalty(VOCAB, torch.device("cpu"))
    penalty.add("a", 1.05)
    penalty.remove("a")
    penalty.remove("never seen")
    assert len(penalty) == 0
