"""Leads a generation along given tokens and notes where it would have gone another way.

As long as it would have given the answer itself, a greedy generation that is led along it does what it would
do anyway; so no difference means equal answers. Behind a first difference, where two free generations would
have nothing in common any more, the comparison goes on.
"""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor

from omni_server.verify.reference_job import Difference


class ForcedChoice(LogitsProcessor):
    """`steps` holds the tokens that are allowed at each step: one, or any of those that end the answer."""

    def __init__(self, steps: Sequence[tuple[int, ...]]) -> None:
        self._steps = steps
        self._num_done = 0
        self.differences: list[Difference] = []

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """`scores` float32 [1, vocabulary]; leaves the best of the allowed tokens."""
        allowed = self._steps[self._num_done]
        row = scores[0]
        ours = max(allowed, key=lambda token: float(row[token]))
        best = int(row.argmax())
        if best not in allowed:
            margin, largest = float(row[best] - row[ours]), float(row[row.isfinite()].abs().max())
            self.differences.append(Difference(self._num_done, ours, best, margin, largest))
        self._num_done += 1
        forced = torch.full_like(scores, -torch.inf)
        forced[0, ours] = 0.0
        return forced
