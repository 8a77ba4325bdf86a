from pathlib import Path

import pytest

from benchmarks.serving.results import Percentiles, load_run
from omni_server.errors import ConfigError
from tests.unit.bench.rows import level, row, run


def spread(percentiles: Percentiles | None) -> list[float]:
    assert percentiles is not None
    return [percentiles.p50, percentiles.p90, percentiles.p99, percentiles.count]


def test_percentiles_lie_between_neighbours_in_proportion() -> None:
    # 5 values: percentile q is at position 4 q / 100 of the sorted ones.
    assert spread(Percentiles.of([50.0, 10.0, 40.0, 20.0, 30.0])) == pytest.approx([30.0, 46.0, 49.6, 5])


def test_percentiles_of_one_value_are_that_value_and_of_none_there_are_none() -> None:
    assert Percentiles.of([2.5]) == Percentiles(p50=2.5, p90=2.5, p99=2.5, count=1)
    assert Percentiles.of([]) is None


def test_unknown_values_do_not_count() -> None:
    assert spread(Percentiles.of([None, 1.0, None, 3.0])) == pytest.approx([2.0, 2.8, 2.98, 2])
    assert Percentiles.of([None]) is None


def test_rates_are_from_the_first_send_to_the_last_byte() -> None:
    measured = level(2, [row(sent_s=1.0, end_to_end_s=2.0), row(sent_s=1.5, end_to_end_s=3.5)])

    assert measured.wall_s == 4.0
    assert measured.audio_s_per_s == 10.0 / 4.0
    assert measured.requests_per_s == 2 / 4.0
    assert measured.text_tokens_per_s == 128 / 4.0


def test_the_real_time_factor_is_end_to_end_time_by_duration() -> None:
    measured = level(1, [row(end_to_end_s=2.0, samples=120_000)])

    assert measured.rtf == Percentiles(p50=0.4, p90=0.4, p99=0.4, count=1)
    assert measured.largest_gap_s == Percentiles(p50=0.75, p90=0.75, p99=0.75, count=1)


def test_failed_requests_take_time_but_give_nothing() -> None:
    measured = level(
        1, [row(end_to_end_s=2.0), row(sent_s=2.0, end_to_end_s=2.0, ttfa_s=9.0, failure="HTTP 500")]
    )

    assert measured.failures == ["HTTP 500"]
    assert measured.audio_s_per_s == 5.0 / 4.0
    assert measured.ttfa_s is not None
    assert (measured.ttfa_s.p99, measured.ttfa_s.count) == (0.5, 1)


def test_a_level_without_any_answer_has_no_rates() -> None:
    measured = level(1, [])

    assert (measured.wall_s, measured.audio_s_per_s, measured.client_cores) == (0.0, 0.0, 0.0)
    assert measured.ttft_s is None


def test_a_run_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    written = run(level(1, [row(0), row(1, ttfa_s=None, failure="the stream broke")]), level(4, []))
    file = tmp_path / "run.json"
    file.write_text(written.model_dump_json(indent=1))

    assert load_run(file) == written


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"format": 2}'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)

    with pytest.raises(ConfigError, match=r"other\.json: not the results of a benchmark"):
        load_run(file)


def test_a_file_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(run(level(1, [])).model_dump_json().replace('"seed"', '"sead"'))

    with pytest.raises(ConfigError, match="sead"):
        load_run(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_run(tmp_path / "none.json")
