"""Grammars of structured outputs within a limit of time.

The engine's loop advances the grammar of each request and makes a mask from it, one after the other, and all requests
wait for that. A short grammar can take minutes for one token: xgrammar follows all ways to read a text at once, and
where repetitions are nested their number grows with each character. A call into it cannot be interrupted, but it
holds no lock of the interpreter, so it is made in a thread that can be left behind.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from omni_server.protocol.vllm_fields import GRAMMAR_ALLOWS_NOTHING, GRAMMAR_TOO_SLOW, GRAMMARS_BUSY

logger = logging.getLogger(__name__)

CALL_LIMIT_S = 0.1
"""Processor time of one call. With a vocabulary of 40 000 tokens, masks of harmless patterns took 0.1 to 3 ms."""
BURST_S = 0.5
SUSTAINED_S = 0.005
"""All calls of a request together may take `BURST_S` and `SUSTAINED_S` for each; a token needs two."""
MAX_LEFT_BEHIND = 2
"""Calls that were given up and still run; each takes a processor core. With so many, further grammars are refused."""
_MIN_WAIT_S = 0.005


class Call:
    """One call in a worker's hands."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._result: Any = None
        self.cpu_s = 0.0

    def run(self) -> None:
        began = time.thread_time()
        try:
            self._result = self._function()
        except BaseException as exc:  # noqa: BLE001 - raised where the result is taken
            self._error = exc
        self.cpu_s = time.thread_time() - began
        self._done.set()

    def wait(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class _Worker:
    """A thread that makes calls. A daemon: a call that was left behind must not hold up the end of the process."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="grammar", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()

    def start(self, function: Callable[[], Any]) -> Call:
        call = Call(function)
        self._calls.put(call)
        return call

    def cpu_s(self) -> float:
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def end(self) -> None:
        """After the call that runs."""
        self._calls.put(None)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()


class GrammarWatch:
    """The threads in which a scheduler's grammars work."""

    def __init__(self, *, call_limit_s: float = CALL_LIMIT_S, max_left_behind: int = MAX_LEFT_BEHIND) -> None:
        self._call_limit_s = call_limit_s
        self._max_left_behind = max_left_behind
        self._idle: deque[_Worker] = deque()
        self._left_behind: list[_Worker] = []

    def watched(self, grammar: StructuredOutputGrammar, request_id: str) -> "WatchedGrammar":
        """`grammar`, which nobody may call any more except through what this returns."""
        self._left_behind = [worker for worker in self._left_behind if worker.is_alive]
        is_busy = len(self._left_behind) >= self._max_left_behind
        return WatchedGrammar(self, grammar, request_id, GRAMMARS_BUSY if is_busy else None)

    def call(self, function: Callable[[], Any]) -> Call | None:
        """None if it took too long; then it still runs. Time is the processor's, so that a busy machine does not
        count against the grammar."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker()
        began, left_s = worker.cpu_s(), self._call_limit_s
        call = worker.start(function)
        while not call.wait(max(left_s, _MIN_WAIT_S)):
            left_s = self._call_limit_s - (worker.cpu_s() - began)
            if left_s <= 0:
                worker.end()
                self._left_behind.append(worker)
                return None
        self._idle.append(worker)
        return call


class WatchedGrammar(StructuredOutputGrammar):
    """One request's grammar. Once it has been given up it accepts no token, so vLLM ends the request with an error,
    and `refusal` says why."""

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
        # A call that is left behind goes on writing, so it has a mask of its own.
        mask = self._mask
        self._call(lambda: self._grammar.fill_bitmask(mask, 0), otherwise=None)
        if self.refusal is None and not mask.any() and not self._grammar.is_terminated():
            self.refusal = GRAMMAR_ALLOWS_NOTHING  # vLLM would take whichever token, and call its refusal unexpected
        if self.refusal is None:
            bitmask[batch_index].copy_(mask[0])
        else:
            bitmask[batch_index].fill_(-1)  # any token: it is refused in any case

    def is_terminated(self) -> bool:
        return self.refusal is None and self._grammar.is_terminated()

    def reset(self) -> None:
        self._call(self._grammar.reset, otherwise=None)

    def _call(self, function: Callable[[], Any], *, otherwise: Any) -> Any:
        if self.refusal is not None:
            return otherwise
        call = self._watch.call(function)
        if call is not None:
            self._spare_s += SUSTAINED_S - call.cpu_s
        if call is None or self._spare_s < 0:
            logger.warning("request %s: its grammar takes too long and was given up", self._request_id)
            self.refusal = GRAMMAR_TOO_SLOW
            return otherwise
        return call.result()
