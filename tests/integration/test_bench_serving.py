"""`scripts/bench_serving` against the real server, as a user starts it."""

import subprocess
import sys
from pathlib import Path

from benchmarks.serving.results import load_run
from tests.integration.server_process import MODEL, ROOT, ServerProcess

SMALL = ("--text-tokens", "8", "--codec-tokens", "40", "--concurrency", "1,2", "--requests-per-client", "2")


def bench(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "bench_serving"), "--base-url", server.url, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_spoken_answers_are_all_of_the_length_asked_for(server: ServerProcess, tmp_path: Path) -> None:
    results = tmp_path / "run.json"

    finished = bench(server, *SMALL, "--json", str(results))

    assert finished.returncode == 0, finished.stdout + finished.stderr
    run = load_run(results)
    assert (run.server.model, run.server.version is not None, run.workload.name) == (MODEL, True, "W1")
    assert [(level.label, len(level.rows), level.failures) for level in run.levels] == [
        ("c=1", 2, []),
        ("c=2", 4, []),
    ]
    for row in (row for level in run.levels for row in level.rows):
        assert (row.text_tokens, row.codec_tokens, row.samples) == (8, 40, 40 * 480)
        assert row.ttfa_s is not None
        assert row.cached_tokens == 0
    assert finished.stdout.splitlines()[0].split() == ["c=1", "c=2"]


def test_a_model_that_is_not_served_fails_every_request(server: ServerProcess) -> None:
    finished = bench(server, *SMALL, "--model", "no-such-model")

    assert finished.returncode == 1
    assert "c=2: 4 failed: HTTP 404: The model 'no-such-model' does not exist." in finished.stdout
