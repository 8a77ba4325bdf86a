"""The output layer of a thinker with random weights: it writes words, and ends after tens of them."""

import torch
from torch import nn

from tests.checkpoints.end_token import end_row

_TEXT_LOGITS = 2.5
"""Standard deviation of the thinker's logits; about 2.9 times this is the largest of its few hundred
words."""
_TEXT_END = 0.025
"""Chance of the end token per greedy step: replies have tens of tokens."""


def shape_text_head(
    lm_head: nn.Linear,
    decoder: nn.Module,
    *,
    spoken: tuple[int, ...],
    end: int,
    opening: list[int],
    seed: int,
) -> None:
    """Keep only the rows of `spoken` and `end`: others give logit 0, far below the words' largest.

    `decoder` takes `input_ids` [n, length]; `opening` are the tokens before a reply.
    """
    weight = lm_head.weight
    rows = weight.clone()
    weight.zero_()
    words = torch.tensor(spoken)
    weight[words] = rows[words] * _TEXT_LOGITS
    babble = words[torch.randint(len(words), (400,), generator=torch.Generator().manual_seed(seed))]
    prompts = torch.cat([babble.view(8, 50), torch.tensor(opening).expand(8, -1)], 1)
    replying = decoder(input_ids=babble[None]).last_hidden_state[0]
    begun = decoder(input_ids=prompts).last_hidden_state[:, -1]
    common = torch.cat([replying.mean(0)[None], begun])
    weight[end] = end_row(rows[end], _TEXT_END, weight, replying, common)
