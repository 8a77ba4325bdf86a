"""How predicted codes are drawn from their logits: greedily or sampled, row by row.

The noise is a function of seed, position, codebook and id alone: a request gets the same codes in any batch,
and again after a preemption. `code_sampling_kernel` does the same in one kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from omni_server.protocol.runtime_config import PredictorSamplingSpec

Choose = Callable[[torch.Tensor, int], torch.Tensor]
"""Takes the logits `[n, vocabulary]` of a predicted codebook and its index, and returns ids int64 `[n]`."""


@dataclass(frozen=True)
class CodeSampling:
    """How a model's predicted codes are sampled, for requests that are not greedy."""

    temperature: float
    """0 is greedy."""
    top_k: int
    """0 is all."""
    top_p: float

    def changed(self, spec: PredictorSamplingSpec) -> "CodeSampling":
        """With the settings of a stage config, as far as there are any."""
        return CodeSampling(
            self.temperature if spec.temperature is None else spec.temperature,
            self.top_k if spec.top_k is None else spec.top_k,
            self.top_p if spec.top_p is None else spec.top_p,
        )


class Draws(NamedTuple):
    """How the codes of a step's tokens are drawn: int64 `[n]` each, and of one shape in every step, whether
    requests are greedy or not."""

    positions: torch.Tensor
    """Of the tokens that the codes are added to."""
    seeds: torch.Tensor
    is_greedy: torch.Tensor
    """0 or 1."""


class Chooser(Protocol):
    """A `Choose` for one step."""

    is_broken: torch.Tensor
    """Whether NaN or positive infinity was among the logits of a row so far: bool `[n]`. Its ids are then
    valid, but mean nothing."""

    def __call__(self, logits: torch.Tensor, codebook: int) -> torch.Tensor: ...


class GreedyChooser:
    """A `Chooser` of the most likely codes, on any device."""

    def __init__(self, draws: Draws) -> None:
        self.is_broken = torch.zeros_like(draws.is_greedy, dtype=torch.bool)

    def __call__(self, logits: torch.Tensor, codebook: int) -> torch.Tensor:
        self.is_broken = self.is_broken | _has_nan_or_positive_inf(logits)
        return logits.argmax(-1)


class CodeChooser:
    """A `Chooser` on any device. The temperature of `sampling` is not 0."""

    def __init__(self, sampling: CodeSampling, draws: Draws) -> None:
        self._sampling = sampling
        self._is_greedy = draws.is_greedy.bool()
        self._state = noise_state(draws.seeds, draws.positions)
        self.is_broken = torch.zeros_like(self._is_greedy)

    def __call__(self, logits: torch.Tensor, codebook: int) -> torch.Tensor:
        self.is_broken = self.is_broken | _has_nan_or_positive_inf(logits)
        vocabulary = logits.shape[-1]
        scores, ids = (logits.float() / self._sampling.temperature).topk(
            min(self._sampling.top_k or vocabulary, vocabulary), dim=-1
        )
        # As `TopPLogitsWarper` in transformers: drops ids above which there is probability `top_p` or more.
        shares = scores.softmax(-1)
        scores = scores.masked_fill(shares.cumsum(-1) - shares >= self._sampling.top_p, float("-inf"))
        noise = gumbel_noise(self._state, codebook, ids)
        sampled = ids.gather(-1, (scores + noise).argmax(-1, keepdim=True)).squeeze(-1)
        return torch.where(self._is_greedy, logits.argmax(-1), sampled)


def _has_nan_or_positive_inf(logits: torch.Tensor) -> torch.Tensor:
    """Whether NaN or positive infinity is in a row: bool `[n]`."""
    return ~(logits < float("inf")).all(-1)  # NaN also fails this comparison


def noise_state(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What the noise of all codebooks at a position has in common: int64 `[n]`, as both arguments."""
    state = _mixed((seeds & _MASK) ^ _mixed((seeds >> 32) & _MASK))
    return _mixed(state ^ (positions & _MASK))


def gumbel_noise(state: torch.Tensor, codebook: int, ids: torch.Tensor) -> torch.Tensor:
    """Float32 `[n, k]` for `ids` `[n, k]` and their `noise_state` `[n]`. The id with the largest sum of logit
    and noise is a sample from the softmax of the logits."""
    bits = _mixed(_mixed(state ^ codebook)[:, None] ^ ids)
    # With the half, 24 bits, which float32 represents exactly: never 0, and never rounded to 1.
    uniform = ((bits >> 9).float() + 0.5) / (1 << 23)
    return -(-uniform.log()).log()


_MASK = 0xFFFFFFFF


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit values in int64 tensors: "lowbias32" of
    https://github.com/skeeto/hash-prospector, on values moved away from its fixed point 0."""
    bits = (bits + 0x9E3779B9) & _MASK
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _MASK
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _MASK
    return bits ^ (bits >> 16)
