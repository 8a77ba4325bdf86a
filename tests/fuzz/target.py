"""What a fuzzer is: a corpus, changes that follow from a seed, and what must hold of each changed input.

`scripts/fuzz` runs the targets for as long as it is told, tests/fuzz/test_targets.py runs each a little.
"""

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

Run = Callable[[random.Random], Awaitable[str]]
"""One input, made from the generator's numbers; returns in a word what became of it. Raises for a finding."""


@dataclass(frozen=True)
class Target:
    name: str
    corpus: str
    """What is changed."""
    open: Callable[[], AbstractAsyncContextManager[Run]]
    outcomes: frozenset[str]
    """All of these must come in a run of `rounds`: else it would not reach what it is for."""
    rounds: int
    """In the test suite."""


@dataclass
class Report:
    num_inputs: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[int, BaseException]] = field(default_factory=list)
    """Number of the input and what was raised."""
    slowest_s: float = 0.0
    slowest: int = 0
    """Number of that input."""


async def fuzz(
    target: Target, seed: int, *, rounds: int, seconds: float | None = None, first: int = 0
) -> Report:
    """`rounds` inputs from number `first` on, or as many as begin within `seconds`. Input N follows from
    `seed`."""
    report = Report()
    began = time.monotonic()
    async with target.open() as run:
        number = first
        while number < first + rounds if seconds is None else time.monotonic() - began < seconds:
            start = time.monotonic()
            try:
                report.outcomes[await run(random.Random(f"{target.name} {seed} {number}"))] += 1
            except Exception as error:  # noqa: BLE001 (what is looked for)
                report.findings.append((number, error))
            took = time.monotonic() - start
            if took > report.slowest_s:
                report.slowest_s, report.slowest = took, number
            report.num_inputs += 1
            number += 1
    report.seconds = time.monotonic() - began
    return report
