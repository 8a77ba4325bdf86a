"""The shipped windows and rules among many callers, on a simulated H200 in virtual time."""

from functools import cache
from pathlib import Path

import pytest

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.load import load_stage_config
from tests.load.measured_h200 import MEASURED, Measured
from tests.load.overload import quantile
from tests.load.simulated_callers import Outcome, SharingRules, call

CONFIG = load_stage_config(Path(__file__).parents[3] / "configs" / "qwen2_5_omni.yaml")
[PLAN] = [edge.chunks for edge in CONFIG.edges if edge.chunks is not None]
MAX_CODES = CONFIG.stages["code2wav"].max_num_batched_tokens
USUAL = PLAN.model_copy(update={"busy": ()})


def called(num_callers: int, plan: ChunkPlan = PLAN) -> Outcome:
    return call(num_callers, plan, max_codes=MAX_CODES)


@cache
def as_shipped(num_callers: int) -> Outcome:
    return called(num_callers)


def first_audio_s(outcome: Outcome) -> float:
    return quantile(outcome.first_audio_s, 0.5)


def test_among_some_others_a_short_second_window_makes_first_audio_earlier_and_nothing_stalls() -> None:
    """Playback begins when that window is expected in time, of which each block is a quarter of a second."""
    for num_callers in (8, 16):
        assert first_audio_s(as_shipped(num_callers)) < first_audio_s(called(num_callers, USUAL))
    assert max(as_shipped(8).stall_s) == 0
    assert max(as_shipped(16).stall_s) < 0.1


def test_among_many_windows_of_about_one_length_make_first_audio_earlier() -> None:
    usual = called(64, USUAL)
    assert first_audio_s(as_shipped(64)) < 0.75 * first_audio_s(usual)
    assert as_shipped(64).wall_s < usual.wall_s


def test_among_many_hardly_anybody_stalls() -> None:
    """Who is heard at once, between two waves of answers, is not passed by the first windows of all the
    others."""
    assert quantile(as_shipped(64).stall_s, 0.99) < 0.1
    assert quantile(as_shipped(64).stall_s, 0.9) == 0


@pytest.mark.parametrize(
    "row",
    [row for row in MEASURED if row.is_calibrated and row.callers <= 16],
    ids=lambda row: f"{row.callers} callers",
)
def test_what_is_simulated_is_what_was_measured(row: Measured) -> None:
    """Within 10 %; benchmarks/scheduler.md has all levels. Where more than four speak, first audio depends on
    when playback begins, for which there were other rules then."""
    sharing = SharingRules(max_pause_s=row.pause_s, distance_per_stream_s=row.distance_s)
    outcome = call(row.callers, PLAN, sharing, max_codes=MAX_CODES, is_warm=False)
    if row.callers <= 4:
        assert first_audio_s(outcome) == pytest.approx(row.first_audio_s, rel=0.1)
    assert outcome.audio_s / outcome.wall_s == pytest.approx(row.audio_s_per_s, rel=0.1)
