"""Predicted codes stay with their tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from stages.runtime.code_sampling import Choose, CodeSampling, Draws
from stages.runtime.frame_predictor import NO_CODE, CodeHistory, frame_predictor, predicted_codes
from stages.runtime.stage_step import StepBatch

NUM_PREDICTED, WIDTH = 2, 4
GREEDY = SamplingParams(temperature=0)
ALL = CodeSampling(temperature=1.0, top_k=100, top_p=1.0)


class Predictor:
    """Predicts twice ten times the token, plus what is chosen of the first of its hidden values and 49 zeros.
    The embedding of codes is their sum."""

    num_predicted = NUM_PREDICTED
    code_sampling = ALL

    def predict(self, hidden: torch.Tensor, sampled: torch.Tensor, choose: Choose) -> torch.Tensor:
        logits = torch.zeros(len(sampled), 50)
        logits[:, :1] = hidden[:, :1]
        return sampled[:, None] * 10 + torch.stack([choose(logits, index) for index in (0, 1)], 1)

    def embed_predicted(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.float().sum(1, keepdim=True).expand(-1, WIDTH)


class GreedyPredictor(Predictor):
    code_sampling = replace(ALL, temperature=0)

    def predict(self, hidden: torch.Tensor, sampled: torch.Tensor, choose: Choose) -> torch.Tensor:
        logits = torch.arange(50.0).roll(8) + hidden[:, :1]  # the largest is at 7
        return torch.stack([choose(logits, index) for index in (0, 1)], 1)


def history(max_num_seqs: int = 2) -> CodeHistory:
    return CodeHistory(Predictor(), max_num_seqs=max_num_seqs, max_model_len=16, device=torch.device("cpu"))


def batch(*parts: tuple[str, int, int]) -> StepBatch:
    """`(request, first position, number of tokens)`"""
    counts = np.array([count for _, _, count in parts])
    return StepBatch(
        [name for name, _, _ in parts],
        np.array([first for _, first, _ in parts]),
        counts,
        np.cumsum(counts) - counts,
    )


def predict(
    codes: CodeHistory, step: StepBatch, tokens: Sequence[int], kept: Sequence[bool]
) -> list[list[int] | None]:
    codes.predict(torch.zeros(len(tokens), WIDTH), torch.tensor(tokens), step, np.array(kept))
    pending = codes.take()
    assert pending is not None
    return [None if made is None else made[0].tolist() for made in pending.finish()]


def added(codes: CodeHistory, step: StepBatch) -> list[float]:
    """What is added to the input of each token."""
    embeds = torch.zeros(step.total_tokens, WIDTH)
    codes.add_embeddings(embeds, step)
    return embeds[:, 0].tolist()


# -- history


def test_warming_up_predicts_codes_of_batches_of_all_sizes_and_keeps_none() -> None:
    codes, sizes = history(max_num_seqs=6), list[int]()
    codes.add("a", 2, GREEDY)
    predict(codes, batch(("a", 0, 2)), [1], [True])
    predicted = codes.predict_codes

    def noted(hidden: torch.Tensor, sampled: torch.Tensor, draws: Draws) -> torch.Tensor:
        sizes.append(len(hidden))
        return predicted(hidden, sampled, draws)

    codes.predict_codes = noted
    codes.warm_up(torch.zeros(6, WIDTH))
    assert sizes == [1, 2, 4, 6]
    assert codes.take() is None
    assert added(codes, batch(("a", 0, 4))) == [0, 0, 20, 0]


def test_a_request_whose_scores_are_no_numbers_is_corrupt_and_no_other() -> None:
    """What its next step looks up, which may be under way, is valid all the same."""
    codes = history()
    codes.add("a", 1, GREEDY)
    codes.add("b", 1, SamplingParams(seed=0))
    hidden = torch.tensor([[torch.nan], [0.0]]).expand(2, WIDTH)
    step = batch(("a", 0, 1), ("b", 0, 1))
    codes.predict(hidden, torch.tensor([1, 2]), step, np.array([True, True]))
    pending = codes.take()
    assert pending is not None
    _, of_b = pending.finish()
    assert of_b is not None
    assert (of_b >= 20).all()
    assert {name: found.kind for name, found in pending.corrupt.items()} == {"a": "logits"}
    assert added(codes, batch(("a", 1, 1), ("b", 1, 1)))[1] == of_b.sum()
    codes.predict(hidden, torch.tensor([1, 2]), step, np.array([False, True]))
    unkept = codes.take()
    assert unkept is not None
    unkept.finish()
    assert not unkept.corrupt


def test_a_request_of_vllms_own_is_left_alone() -> None:
    codes = history()
    assert predict(codes, batch(("warm-up", 0, 2)), [1], [True]) == [None]
    codes.remove("warm-up")


def test_a_model_that_predicts_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="object predicts no codes"):
        frame_predictor(object(), 2)


def test_a_predictor_with_temperature_0_is_greedy_whatever_requests_ask_for() -> None:
    sampled = torch.zeros(3, dtype=torch.int32)
    draws = Draws(torch.arange(3), torch.arange(3), torch.tensor([0, 1, 0]))
    hidden = torch.zeros(3, WIDTH)
    assert predicted_codes(GreedyPredictor(), hidden, sampled, draws).tolist() == [[7, 7]] * 3
    hidden[1] = torch.nan
    made = predicted_codes(GreedyPredictor(), hidden, sampled, draws)
    assert made.tolist() == [[7, 7], [NO_CODE, NO_CODE], [7, 7]]


def test_a_request_without_a_seed_samples_by_its_id() -> None:
    def codes_of(name: str) -> list[list[int] | None]:
        codes = history()
        codes.add(name, 1, SamplingParams(temperature=1))
        return predict(codes, batch((name, 0, 1)), [0], [True])

    assert codes_of("a") == codes_of("a")
    assert len({str(codes_of(name)) for name in "abcdefgh"}) > 4
