from benchmarks.serving.table import table
from benchmarks.serving.workload import WORKLOADS
from tests.unit.bench.rows import level, row, run


def cells(text: str) -> dict[str, list[str]]:
    """Lines by the name that stands in front of their first double space."""
    return {
        line.split("  ")[0].strip(): [cell.strip() for cell in line.split("  ")[1:] if cell.strip()]
        for line in text.splitlines()
    }


def test_every_load_level_has_a_column() -> None:
    text = table(run(level(1, [row()]), level(4, [row(ttfa_s=0.5), row(ttfa_s=1.5)])))

    lines = cells(text)
    assert lines[""] == ["c=1", "c=4"]
    assert lines["requests"] == ["1", "2"]
    assert lines["failures"] == ["0", "0"]
    assert lines["prompt tokens p50 (cached)"] == ["60 (0)", "60 (0)"]
    assert lines["TTFA s"][-2:] == ["0.500 0.500 0.500", "1.00 1.40 1.49"]
    assert lines["underrun s"][-1] == "0 0 0"
    assert lines["audio s/s"] == ["2.50", "5.00"]
    assert "WARNING" not in text


def test_all_lines_of_the_table_are_equally_long() -> None:
    text = table(run(level(1, [row()]), level(64, [row(end_to_end_s=1234.5, failure=None)])))

    assert len({len(line) for line in text.splitlines()[:13]}) == 1


def test_failures_are_grouped_by_reason() -> None:
    broken = [row(failure="the stream broke"), row(failure="HTTP 500: no"), row(failure="the stream broke")]
    lines = table(run(level(1, [row()]), level(4, broken))).splitlines()

    assert [line for line in lines if "failed:" in line] == [
        "c=4: 2 failed: the stream broke",
        "c=4: 1 failed: HTTP 500: no",
    ]


def test_a_load_generator_that_used_much_of_a_core_says_so() -> None:
    lines = table(run(level(1, [row()], client_cpu_s=0.9), level(4, [row()], client_cpu_s=1.1))).splitlines()

    assert "c=1 45%" in lines[-2]
    assert lines[-1].startswith("WARNING: the load generator used more than 50% of a core (c=4)")


def test_text_alone_has_no_lines_about_audio() -> None:
    workload = WORKLOADS["W1"].model_copy(update={"modalities": "text", "codec_tokens": 0})
    text = table(run(level(1, [row(samples=0, ttfa_s=None)]), workload=workload))

    assert not any(word in text for word in ("TTFA", "RTF", "underrun", "audio"))
    assert cells(text)["text tokens/s"] == ["32.0"]
