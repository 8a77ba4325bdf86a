"""The shipped windows and distances among many callers, on a simulated H200 in virtual time."""

from pathlib import Path

from omni_server.config.load import load_stage_config
from tests.load.overload import quantile
from tests.load.simulated_callers import Distances, Outcome, call

CONFIG = load_stage_config(Path(__file__).parents[3] / "configs" / "qwen2_5_omni.yaml")
[PLAN] = [edge.chunks for edge in CONFIG.edges if edge.chunks is not None]
MAX_CODES = CONFIG.stages["code2wav"].max_num_batched_tokens
AS_SHIPPED = Distances(per_stream_s=CONFIG.stages["talker"].step_interval_per_stream_ms / 1000)


def first_audio_s(outcome: Outcome) -> float:
    return quantile(outcome.first_audio_s, 0.5)


def test_among_some_others_a_short_second_window_makes_first_audio_earlier_and_nothing_stalls() -> None:
    """The gate holds first audio for that window, of which each block is a quarter of a second of codes."""
    usual = PLAN.model_copy(update={"busy": ()})
    for num_callers in (8, 16):
        shipped = call(num_callers, PLAN, AS_SHIPPED, max_codes=MAX_CODES)
        assert first_audio_s(shipped) < 0.95 * first_audio_s(
            call(num_callers, usual, AS_SHIPPED, max_codes=MAX_CODES)
        )
        assert max(shipped.underrun_s) == 0


def test_among_many_windows_of_about_one_length_make_first_audio_earlier() -> None:
    shipped = call(64, PLAN, AS_SHIPPED, max_codes=MAX_CODES)
    usual = call(64, PLAN.model_copy(update={"busy": ()}), AS_SHIPPED, max_codes=MAX_CODES)
    assert first_audio_s(shipped) < 0.75 * first_audio_s(usual)
    assert shipped.wall_s < usual.wall_s


def test_among_some_others_distances_in_proportion_to_them_do_not_slow_the_answers_down() -> None:
    """Fixed ones, in those moments in which code2wav's steps are full, did."""
    shipped = call(16, PLAN, AS_SHIPPED, max_codes=MAX_CODES)
    while_full = Distances(thinker_full_s=0.018, talker_full_s=0.011)
    assert shipped.wall_s < 0.97 * call(16, PLAN, while_full, max_codes=MAX_CODES).wall_s


def test_among_many_hardly_anybody_stalls() -> None:
    """Who is heard at once, between two waves of answers, is not passed by the first windows of all the
    others."""
    shipped = call(64, PLAN, AS_SHIPPED, max_codes=MAX_CODES)
    assert quantile(shipped.underrun_s, 0.99) < 0.1
    assert quantile(shipped.underrun_s, 0.9) == 0
