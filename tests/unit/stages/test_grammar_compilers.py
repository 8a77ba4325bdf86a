"""Compilations that take too long are given up, and never compete with the engine as equals."""

import os
import threading
from collections.abc import Iterator

import pytest

from omni_server.protocol.vllm_fields import GRAMMAR_TOO_SLOW, GRAMMARS_BUSY
from stages.runtime.grammar_limits import COMPILE_NICENESS, GrammarCompilers, GrammarRefusedError

LONG_S = 30.0


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Ends the compilations that wait for it."""
    event = threading.Event()
    yield event
    event.set()


def refusal(compilers: GrammarCompilers, release: threading.Event) -> str:
    error = compilers.submit(release.wait, LONG_S).exception(LONG_S)
    assert isinstance(error, GrammarRefusedError)
    return error.refusal


def test_the_result_is_the_functions() -> None:
    compilers = GrammarCompilers()
    assert compilers.submit(max, 3, 5).result(LONG_S) == 5
    assert isinstance(compilers.submit(int, "x").exception(LONG_S), ValueError)
    assert compilers.submit(min, 3, 5).result(LONG_S) == 3


def test_threads_of_a_compilation_have_a_low_priority() -> None:
    def priorities() -> list[int]:
        found = [os.getpriority(os.PRIO_PROCESS, threading.get_native_id())]
        inner = threading.Thread(
            target=lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        )
        inner.start()
        inner.join()
        return found

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert GrammarCompilers().submit(priorities).result(LONG_S) == [min(before + COMPILE_NICENESS, 19)] * 2
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_a_compilation_that_takes_too_long_is_given_up_and_the_next_one_made(
    release: threading.Event,
) -> None:
    compilers = GrammarCompilers(num_threads=1, limit_s=0.01)
    assert refusal(compilers, release) == GRAMMAR_TOO_SLOW
    assert compilers.submit(max, 3, 5).result(LONG_S) == 5


def test_further_ones_are_refused_while_too_many_that_were_given_up_run(release: threading.Event) -> None:
    compilers = GrammarCompilers(num_threads=1, limit_s=0.01, max_left_behind=2)
    ended = threading.Event()

    def compile_slowly() -> None:
        release.wait(LONG_S)
        ended.set()

    assert isinstance(compilers.submit(compile_slowly).exception(LONG_S), GrammarRefusedError)
    assert refusal(compilers, release) == GRAMMAR_TOO_SLOW
    assert refusal(compilers, release) == GRAMMARS_BUSY
    release.set()
    assert ended.wait(LONG_S)
    for thread in threading.enumerate():
        if thread.name == "grammar compiler":
            thread.join(LONG_S)
    assert compilers.submit(max, 3, 5).result(LONG_S) == 5


def test_no_more_compile_at_the_same_time_than_allowed(release: threading.Event) -> None:
    compilers = GrammarCompilers(num_threads=2, limit_s=LONG_S)
    barrier = threading.Barrier(2, timeout=LONG_S)
    assert [one.result(LONG_S) is not None for one in [compilers.submit(barrier.wait) for _ in range(2)]] == [
        True
    ] * 2
    started = threading.Semaphore(0)

    def compile_slowly() -> bool:
        started.release()
        return release.wait(LONG_S)

    *_, third = (compilers.submit(compile_slowly) for _ in range(3))
    assert all(started.acquire(timeout=LONG_S) for _ in range(2))
    assert not third.running()
    release.set()
    assert third.result(LONG_S)
