"""What a talker with predicted codebooks is to speak, as rows, and what came of it."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Utterance:
    """The talker's input: the rows that would come from the thinker."""

    prompt_ids: tuple[int, ...]
    num_replaced: int
    rows: torch.Tensor
    """`[num_rows, width]`: of the prompt, then of generated text."""
    tail: torch.Tensor
    """`[2, width]`"""
    positions: torch.Tensor
    """M-RoPE positions of the prompt, float32 `[3, len(prompt_ids)]`."""

    @property
    def position_delta(self) -> float:
        return float(self.positions.max()) + 1 - len(self.prompt_ids)

    def row(self, position: int) -> torch.Tensor:
        behind = position - len(self.rows)
        return self.rows[position] if behind < 0 else self.tail[min(behind, len(self.tail) - 1)]


@dataclass(frozen=True)
class Engine:
    is_cramped: bool = False
    """Has room for some of the requests only, which are preempted."""
    is_async: bool = False
    """Schedules a step before the result of the one before is known."""


@dataclass(frozen=True)
class Speaking:
    """How the utterances are spoken in one run."""

    names: tuple[str, ...]
    is_together: bool = False
    """At once, and their rows arrive in pieces; otherwise one after the other, with all rows."""
    num_codes: int = 24
    tokens_per_output: tuple[int, ...] = (1,)
    temperature: float = 0.0
    seed: int | None = None
    has_logprobs: bool = False


@dataclass
class Spoken:
    frames: list[list[int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the sampled tokens, if they were requested."""
    finish_reason: str = ""
    num_outputs: int = 0


@dataclass(frozen=True)
class Run:
    """All utterances of a `Speaking` on one engine."""

    speaking: Speaking
    spoken: dict[str, Spoken]
    num_resumed: int
    num_left: int
    """Requests that still hold rows or codes in the worker after the last one has ended."""
    generation: int
    """Of vLLM's model runner."""
    is_asynchronous: bool
    """A step was scheduled before the result of the one before was known."""
