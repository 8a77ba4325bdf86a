"""Compiling of structured outputs' grammars within a limit of time and at a low priority.

A short grammar can take minutes to compile: xgrammar tries each token of the vocabulary in all ways to read it, which
repetitions such as `([^"]{1,5000}){1,5000}` multiply. It does so on many threads, and cannot be interrupted. So each
compilation has a thread that can be left behind, and the scheduler of the operating system prefers the engine to it.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from omni_server.protocol.vllm_fields import GRAMMAR_TOO_SLOW, GRAMMARS_BUSY
from stages.runtime.grammar_watch import MAX_LEFT_BEHIND, Call

LIMIT_S = 5.0
"""Of one compilation; vLLM's own limit for regular expressions."""
NICENESS = 10
"""A tenth of the engine's share of a core that both want. With much less, a thread that holds the interpreter's lock
would keep the engine waiting."""

_Job = tuple["Future[Any]", Callable[[], Any]]


class GrammarRefusedError(Exception):
    """The grammar of a request was not compiled; `reason` is one of `omni_server.protocol.vllm_fields`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GrammarCompilers:
    """Takes the place of the executor of vLLM's `StructuredOutputManager`."""

    def __init__(
        self, *, num_threads: int | None = None, limit_s: float = LIMIT_S, max_left_behind: int = MAX_LEFT_BEHIND
    ) -> None:
        """`num_threads`: compilations at the same time; by default as many as vLLM allows, half of the cores."""
        self._num_threads = num_threads if num_threads is not None else max(1, ((os.cpu_count() or 1) + 1) // 2)
        self._limit_s = limit_s
        self._max_left_behind = max_left_behind
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._num_started = 0
        self._lock = threading.Lock()
        self._left_behind: list[threading.Thread] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        """The result of `function(*args)`, what it raises, or `GrammarRefusedError`."""
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: function(*args)))
        if self._num_started < self._num_threads:
            self._num_started += 1
            threading.Thread(target=self._work, name="grammar compilers", daemon=True).start()
        return future

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        """vLLM calls it when the engine ends. There is nothing to do: the threads are daemons."""

    def _work(self) -> None:
        os.nice(NICENESS)  # on Linux of this thread, and of those that it starts
        while True:
            future, function = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._compile(function))
            except Exception as error:  # noqa: BLE001 - the future's
                future.set_exception(error)

    def _compile(self, function: Callable[[], Any]) -> Any:
        with self._lock:
            self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
            if len(self._left_behind) >= self._max_left_behind:
                raise GrammarRefusedError(GRAMMARS_BUSY)
        call = Call(function)
        # A daemon: a compilation that was left behind must not hold up the end of the process.
        thread = threading.Thread(target=call.run, name="grammar compiler", daemon=True)
        thread.start()
        if call.wait(self._limit_s):
            return call.result()
        with self._lock:
            self._left_behind.append(thread)
        raise GrammarRefusedError(GRAMMAR_TOO_SLOW)
