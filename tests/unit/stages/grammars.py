"""Grammars that do as they are told."""

import threading
import time

import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


class ScriptedGrammar(StructuredOutputGrammar):
    """Accepts all tokens, allows token 3 only; `spin_s` is the processor time of the next calls."""

    def __init__(self, *, spin_s: float = 0.0) -> None:
        self.spin_s = spin_s
        self.accepted: list[int] = []
        self.threads: set[int] = set()
        self.is_released = threading.Event()
        """Ends a call that spins."""
        self.error: Exception | None = None

    def _work(self) -> None:
        self.threads.add(threading.get_ident())
        began = time.thread_time()
        while time.thread_time() - began < self.spin_s and not self.is_released.is_set():
            pass
        if self.error is not None:
            raise self.error

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self._work()
        self.accepted += tokens
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        self._work()
        return tokens[:1]

    def rollback(self, num_tokens: int) -> None:
        self._work()
        del self.accepted[len(self.accepted) - num_tokens :]

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        self._work()
        bitmask[batch_index].fill_(0)
        bitmask[batch_index, 0] = 1 << 3

    def is_terminated(self) -> bool:
        return 2 in self.accepted

    def reset(self) -> None:
        self._work()
        self.accepted.clear()
