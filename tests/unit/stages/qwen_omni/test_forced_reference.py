"""A generation that is led along given tokens."""

import torch

from omni_server.protocol.reference import Difference
from stages.qwen_omni.forced_reference import ForcedChoice

SCORES = torch.tensor([[0.5, 3.0, -torch.inf, 1.0]])
NO_IDS = torch.zeros(1, 0, dtype=torch.long)


def test_only_the_given_token_is_left() -> None:
    choice = ForcedChoice([(3,)])
    assert choice(NO_IDS, SCORES).tolist() == [[-torch.inf, -torch.inf, -torch.inf, 0.0]]


def test_the_token_that_would_have_been_chosen_is_no_difference() -> None:
    choice = ForcedChoice([(1,)])
    choice(NO_IDS, SCORES)
    assert choice.differences == []


def test_another_one_is_noted_with_its_place_and_margin_and_the_next_step_goes_on() -> None:
    choice = ForcedChoice([(1,), (0,), (1,)])
    for _ in range(3):
        choice(NO_IDS, SCORES)
    assert choice.differences == [Difference(index=1, ours=0, reference=1, margin=2.5, largest=3.0)]


def test_of_several_tokens_that_end_an_answer_the_likeliest_counts() -> None:
    choice = ForcedChoice([(0, 3), (0, 1)])
    assert int(choice(NO_IDS, SCORES).argmax()) == 3
    assert int(choice(NO_IDS, SCORES).argmax()) == 1
    assert choice.differences == [Difference(index=0, ours=3, reference=1, margin=2.0, largest=3.0)]
