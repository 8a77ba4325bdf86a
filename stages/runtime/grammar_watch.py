"""Time limits on following the grammars of structured outputs.

A compiled grammar can take minutes for one token: xgrammar follows all ways to read a text simultaneously,
and with nested repetitions their number grows with each character. The engine's loop advances the grammars
and builds their masks one request after another, and all requests wait for that.

A call cannot be interrupted, but does not hold the interpreter lock. So each runs in a thread that can be
abandoned.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from omni_server.protocol.vllm_fields import GRAMMAR_ALLOWS_NOTHING, GRAMMAR_TOO_SLOW, GRAMMARS_BUSY

logger = logging.getLogger(__name__)

CALL_LIMIT_S = 0.1
"""CPU time of one call. With a vocabulary of 40 000 tokens, masks of harmless patterns took
0.1 to 3 ms."""
BURST_S = 0.5
SUSTAINED_S = 0.005
"""All calls of a request may take `BURST_S` plus `SUSTAINED_S` per call in total. A token needs two calls."""
MAX_LEFT_BEHIND = 2
"""Maximum number of abandoned calls that still run, each on a core. At this number, further grammars are
refused."""
_MIN_WAIT_S = 0.005

_Job = tuple["Future[Any]", Callable[[], Any]]


class _Worker:
    """A thread that makes calls. It is a daemon so that an abandoned call does not delay the end of the
    process."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._calls.get()) is not None:
            future, function = job
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised where the result is read
                future.set_exception(error)

    def start(self, function: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._calls.put((future, function))
        return future

    def cpu_s(self) -> float:
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def end(self) -> None:
        """End after this call."""
        self._calls.put(None)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()


def _is_done(call: "Future[Any]", timeout_s: float) -> bool:
    try:
        call.exception(timeout_s)
    except TimeoutError:
        return False
    return True


class GrammarWatch:
    """Runs a scheduler's grammar calls in threads."""

    def __init__(self, *, call_limit_s: float = CALL_LIMIT_S, max_left_behind: int = MAX_LEFT_BEHIND) -> None:
        self._call_limit_s = call_limit_s
        self._max_left_behind = max_left_behind
        self._idle: deque[_Worker] = deque()
        self._left_behind: list[_Worker] = []

    def watched(self, grammar: StructuredOutputGrammar, request_id: str) -> "WatchedGrammar":
        """Watch `grammar`. From now on it may only be called through the returned object."""
        self._left_behind = [worker for worker in self._left_behind if worker.is_alive]
        is_busy = len(self._left_behind) >= self._max_left_behind
        return WatchedGrammar(self, grammar, request_id, GRAMMARS_BUSY if is_busy else None)

    def call(self, function: Callable[[], Any]) -> "tuple[Future[Any], float] | None":
        """Returns the finished call and its CPU time in seconds, or None if it took too long and still runs.
        Measures CPU time, so that a busy machine does not count against the grammar."""
        worker = self._idle.pop() if self._idle else _Worker("grammar")
        began, used_s = worker.cpu_s(), 0.0
        call = worker.start(function)
        while not _is_done(call, max(self._call_limit_s - used_s, _MIN_WAIT_S)):
            used_s = worker.cpu_s() - began
            if used_s >= self._call_limit_s:
                worker.end()
                self._left_behind.append(worker)
                return None
        self._idle.append(worker)
        return call, worker.cpu_s() - began


class WatchedGrammar(StructuredOutputGrammar):
    """One request's grammar. Once abandoned, it accepts no token, so vLLM ends the request with an error, and
    `refusal` gives the reason."""

    def __init__(
        self, watch: GrammarWatch, grammar: StructuredOutputGrammar, request_id: str, refusal: str | None
    ) -> None:
        self._watch = watch
        self._grammar = grammar
        self._request_id = request_id
        self._mask: torch.Tensor | None = None
        self._spare_s = BURST_S
        self.refusal = refusal

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return bool(self._call(lambda: self._grammar.accept_tokens(request_id, tokens), otherwise=False))

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        valid: list[int] = self._call(lambda: self._grammar.validate_tokens(tokens), otherwise=[])
        return valid

    def rollback(self, num_tokens: int) -> None:
        self._call(lambda: self._grammar.rollback(num_tokens), otherwise=None)

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        if self._mask is None:
            self._mask = torch.full_like(bitmask[:1], -1)
        # An abandoned call continues to write, so it has its own mask.
        mask = self._mask
        self._call(lambda: self._grammar.fill_bitmask(mask, 0), otherwise=None)
        if self.refusal is None and not mask.any() and not self._grammar.is_terminated():
            self.refusal = (
                GRAMMAR_ALLOWS_NOTHING  # vLLM would sample any token and then report an unexpected refusal
            )
        if self.refusal is None:
            bitmask[batch_index].copy_(mask[0])
        else:
            bitmask[batch_index].fill_(-1)  # allow any token: all are refused anyway

    def is_terminated(self) -> bool:
        return self.refusal is None and self._grammar.is_terminated()

    def reset(self) -> None:
        self._call(self._grammar.reset, otherwise=None)

    def _call(self, function: Callable[[], Any], *, otherwise: Any) -> Any:
        if self.refusal is not None:
            return otherwise
        made = self._watch.call(function)
        if made is not None:
            self._spare_s += SUSTAINED_S - made[1]
        if made is None or self._spare_s < 0:
            logger.warning("request %s: its grammar takes too long and was given up", self._request_id)
            self.refusal = GRAMMAR_TOO_SLOW
            return otherwise
        return made[0].result()
