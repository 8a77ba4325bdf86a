"""scripts/abort_storm, soak, overload and slow_readers: what they call a success, without the minutes that
they take.

Short forms of what they do are run by tests/faults/test_load.py.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from tests.faults.supervised_server import STAGES
from tests.load.memory import MIB, Life
from tests.load.overload import Accepted, OverloadResult, quantile
from tests.load.soak import SoakResult
from tests.load.storm import StormResult
from tests.load.tally import Tally

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
NAMES = ("abort_storm", "soak", "overload", "slow_readers")


def script(name: str) -> ModuleType:
    loader = SourceFileLoader(name, str(SCRIPTS / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)  # not among the scripts
        loader.exec_module(module)
    return module


def good_tally() -> Tally:
    return Tally(sent=10, exact=6, aborted=4)


def life(*rss_mib: int, role: str = "server") -> Life:
    count = len(rss_mib)
    seconds = [5.0 * number for number in range(count)]
    return Life(role, 1, 0.0, seconds, [size * MIB for size in rss_mib], [30] * count, [70] * count)


def soaked(tally: Tally | None = None, lives: list[Life] | None = None) -> SoakResult:
    flat = [life(100, 101, 100, 101, 100, role=role) for role in ("server", *STAGES)]
    return SoakResult(tally or good_tally(), lives or flat, ["talker"], {}, [])


@pytest.mark.parametrize("name", NAMES)
def test_help_tells_what_it_does(name: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / name, "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage:")
    assert "(default: " in done.stdout


def with_one_answer_twice(tally: Tally) -> None:
    tally.took_id("chatcmpl-1")
    tally.took_id("chatcmpl-1")


def with_one_more_sent(tally: Tally) -> None:
    tally.sent += 1


BROKEN: dict[str, Callable[[Tally], None]] = {
    "wrong": lambda tally: tally.wrong.append("load-1 (text): another text"),
    "lost": lambda tally: tally.lost.append("load-1 (text): nothing for 300 s"),
    "duplicated": with_one_answer_twice,
    "no end": with_one_more_sent,
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_every_answer_counts(broken: Callable[[Tally], None], capsys: pytest.CaptureFixture[str]) -> None:
    storm, soak = script("abort_storm"), script("soak")
    assert storm.report(StormResult(good_tally(), {}, []))
    assert soak.report(soaked(), 32)
    assert "problem" not in capsys.readouterr().out
    tally = good_tally()
    broken(tally)
    assert not storm.report(StormResult(tally, {}, []))
    assert not soak.report(soaked(tally), 32)
    assert "problem: " in (out := capsys.readouterr().out) or "11 requests, but 10 ends" in out


def test_what_is_left_behind_or_has_changed_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    storm, soak = script("abort_storm"), script("soak")
    leaked = {"tasks of the event loop": (12.0, 13.0)}
    assert not storm.report(StormResult(good_tally(), leaked, []))
    assert not storm.report(StormResult(good_tally(), {}, ["speech"]))
    assert not soak.report(replace(soaked(), leaked=leaked), 32)
    assert not soak.report(replace(soaked(), changed=["speech"]), 32)
    assert "not given back: tasks of the event loop: 12 before, 13 after" in capsys.readouterr().out


def test_memory_that_grows_beyond_the_bound_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    soak = script("soak")
    lives = [life(100, 110, 120, 130, 140, role=role) for role in ("server", *STAGES)]
    assert soak.report(soaked(lives=lives), 41)
    assert not soak.report(soaked(lives=lives), 39)
    assert not soak.report(soaked(lives=lives[:-1]), 41), "one was never looked at"
    assert "memory of talker grew by more than 39 MiB" in capsys.readouterr().out
    assert lives[0].slope_bytes_per_h() == pytest.approx(10 * MIB * 3600 / 5)


def test_memory_of_an_engine_that_was_started_anew_is_judged_from_when_its_caches_were_full() -> None:
    server, thinker = life(100, 120, 140), life(100, 200, 300, 301, 302, role="thinker")
    first, second = life(90, 95, role="talker"), life(50, 150, 300, 304, 308, role="talker")
    result = replace(soaked(lives=[server, thinker, first, second]), filled_s=10.0)
    assert [single.role for single in result.judged_lives()] == ["server", "thinker", "talker"]
    assert [single.growth_bytes() / MIB for single in result.judged_lives()] == [40, 202, 8]
    assert replace(result, filled_s=None).judged_lives()[2].growth_bytes() / MIB == 258


@pytest.mark.parametrize(
    "result",
    [
        OverloadResult(3, [Accepted(31.0, 1.0)], [0.01, 0.01], lag_s=[0.0]),
        OverloadResult(3, [Accepted(3.0, 1.0)], [0.01], lag_s=[0.0]),
    ],
    ids=["late", "no end"],
)
def test_late_and_missing_answers_under_overload_are_failures(result: OverloadResult) -> None:
    overload = script("overload")
    assert overload.report(OverloadResult(3, [Accepted(3.0, 1.0)], [0.01, 0.02], lag_s=[0.0]), 30)
    assert not overload.report(result, 30)


def test_quantiles() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [quantile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert quantile([7.0], 0.99) == 7
