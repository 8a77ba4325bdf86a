"""From the command line to the results, against a server whose answers are known."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.serving.arguments import parse
from benchmarks.serving.main import run_command
from benchmarks.serving.results import Run, load_run
from omni_server.errors import ConfigError
from tests.unit.bench.frames import DONE, chunk, frame, spoken, usage, written
from tests.unit.bench.scripted_server import Json, Pause, Reply, ScriptedServer, Start

ROOT = Path(__file__).parents[3]
SMALL = ("--text-tokens", "8", "--codec-tokens", "40")
WHOLE = spoken(8, 40)


def bench(server: ScriptedServer, folder: Path, *arguments: str) -> tuple[int, Run]:
    """The exit code, and the run as its JSON file tells it."""
    file = folder / "run.json"
    words = ["bench_serving", "--base-url", server.url, "--json", str(file), "--warmup", "0", *arguments]
    return run_command(parse(words[1:]), words), load_run(file)


def test_a_closed_loop_counts_what_was_streamed(start: Start, tmp_path: Path) -> None:
    server = start(lambda body, number: Reply(WHOLE))

    code, run = bench(server, tmp_path, *SMALL, "--concurrency", "1,3", "--requests-per-client", "2")

    assert code == 0
    assert [(level.label, len(level.rows), level.failures) for level in run.levels] == [
        ("c=1", 2, []),
        ("c=3", 6, []),
    ]
    assert server.peak_in_flight <= 3
    for row in (row for level in run.levels for row in level.rows):
        assert (row.samples, row.text_deltas, len(row.audio_gaps_s)) == (40 * 480, 2, 1)
        assert (row.prompt_tokens, row.cached_tokens, row.text_tokens, row.codec_tokens) == (60, 16, 8, 40)
        assert row.finish_reason == "length"
        assert row.ttft_s is not None
        assert row.ttfa_s is not None
        assert 0 < row.ttft_s <= row.ttfa_s <= row.end_to_end_s
    assert (run.server.model, run.server.version, run.workload.codec_tokens) == ("scripted", "1.2.3", 40)


def test_answers_of_a_codec_with_other_frames_have_the_length_that_was_asked_for(
    start: Start, tmp_path: Path
) -> None:
    """Frames of 1,920 samples, of which the first loses 555, as with Qwen3-Omni."""
    server = start(lambda body, number: Reply(spoken(8, 40, 40 * 1920 - 555)))
    frames = ("--samples-per-codec-token", "1920", "--sample-tolerance")
    run_once = (*SMALL, "--concurrency", "1", "--requests-per-client", "1", *frames)

    code, run = bench(server, tmp_path, *run_once, "555")
    assert (code, run.levels[0].rows[0].samples) == (0, 40 * 1920 - 555)
    code, run = bench(server, tmp_path, *run_once, "554")
    assert (code, run.levels[0].rows[0].failure) == (1, "76245 samples instead of 76800")


def test_what_is_sent_names_the_first_model_and_its_first_voice_and_is_never_the_same(
    start: Start, tmp_path: Path
) -> None:
    server = start(lambda body, number: Reply(WHOLE))

    bench(server, tmp_path, *SMALL, "--concurrency", "1,2", "--warmup", "1")

    assert {str(body["model"]) for body in server.requests} == {"scripted"}
    assert {str(body["audio"]) for body in server.requests} == {str({"voice": "Ada", "format": "pcm16"})}
    assert len({str(body["messages"]) for body in server.requests}) == len(server.requests) == 4 + 8 + 2


def test_the_same_seed_asks_the_same(start: Start, tmp_path: Path) -> None:
    server = start(lambda body, number: Reply(WHOLE))

    for seed in ("5", "5", "6"):
        bench(server, tmp_path, *SMALL, "--concurrency", "1", "--requests-per-client", "1", "--seed", seed)

    first, again, other = (body["messages"] for body in server.requests)
    assert first == again
    assert first != other


def test_a_pause_in_the_audio_is_an_underrun_and_a_gap(start: Start, tmp_path: Path) -> None:
    parts: list[bytes | Pause] = list(WHOLE)
    parts.insert(5, Pause(0.4))  # between the first quarter of 0.8 s and the rest
    server = start(lambda body, number: Reply(tuple(parts)))

    _, run = bench(server, tmp_path, *SMALL, "--concurrency", "1", "--requests-per-client", "1")

    row = run.levels[0].rows[0]
    assert row.stalls == 1
    assert row.audio_gaps_s[0] == pytest.approx(row.underrun_s + 0.2)
    assert row.largest_gap_s is not None
    assert row.largest_gap_s >= 0.39


def test_an_open_loop_sends_all_its_requests(start: Start, tmp_path: Path) -> None:
    server = start(lambda body, number: Reply(WHOLE))

    code, run = bench(server, tmp_path, *SMALL, "--request-rate", "100,200", "--num-requests", "7")

    assert code == 0
    assert [(level.label, len(level.rows)) for level in run.levels] == [("100/s", 7), ("200/s", 7)]


FAILURES = {
    "HTTP 503: full": Reply(status=503, body=b'{"error": {"message": "full", "type": "x"}}'),
    "HTTP 502: bad gateway": Reply(status=502, body=b"bad gateway"),
    "the connection broke in the middle of the answer": Reply(WHOLE[:3], break_off=True),
    "the stream ended without [DONE]": Reply(WHOLE[:-1]),
    "no usage in the stream": Reply((*WHOLE[:-2], DONE)),
    "7 text tokens instead of 8": Reply(spoken(7, 40)),
    "18720 samples instead of 19200": Reply(spoken(8, 39)),
    "19200 samples, while usage has 39 codec tokens": Reply((*WHOLE[:-2], frame(usage(8, 39)), DONE)),
    "error in the stream: out of memory": Reply((*WHOLE[:3], frame({"error": {"message": "out of memory"}}))),
    "half a sample at the end of the audio": Reply((frame(chunk({"audio": {"data": "AA=="}})), *WHOLE)),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_an_answer_that_is_not_what_was_asked_for_fails(
    reason: str, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(lambda body, number: Reply(WHOLE) if number == 0 else FAILURES[reason])

    code, run = bench(server, tmp_path, *SMALL, "--concurrency", "1", "--requests-per-client", "3")

    assert code == 1
    assert run.levels[0].failures == [reason, reason]
    assert f"c=1: 2 failed: {reason}" in capsys.readouterr().out.splitlines()


def test_an_answer_that_does_not_come_fails(start: Start, tmp_path: Path) -> None:
    server = start(lambda body, number: Reply((*WHOLE[:3], Pause(60))))

    code, run = bench(
        server, tmp_path, *SMALL, "--concurrency", "1", "--requests-per-client", "1", "--timeout", "1"
    )

    assert code == 1
    assert run.levels[0].failures == ["not answered within 1 s"]


def test_a_plain_text_server_is_measured_without_any_audio(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(lambda body, number: Reply(written(8)))

    code, run = bench(server, tmp_path, "--server", "openai-text", "--text-tokens", "8", "--concurrency", "2")

    assert code == 0
    assert [row.samples for row in run.levels[0].rows] == [0] * 8
    assert run.workload.codec_tokens == 0
    assert all(not {"audio", "modalities", "stage_sampling"} & body.keys() for body in server.requests)
    assert "TTFA" not in capsys.readouterr().out


def test_the_key_is_sent_and_not_told(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(lambda body, number: Reply(WHOLE))
    monkeypatch.setenv("OMNI_SERVER_API_KEY", "secret-7")

    bench(server, tmp_path, *SMALL, "--concurrency", "1", "--requests-per-client", "1")

    assert server.authorizations == ["Bearer secret-7"]
    assert "secret-7" not in (tmp_path / "run.json").read_text()


def test_an_interrupt_ends_the_run_with_what_was_measured(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(body: Json, number: int) -> Reply:
        if number < 2:
            return Reply(WHOLE)
        os.kill(os.getpid(), signal.SIGINT)
        return Reply((*WHOLE[:3], Pause(60)))

    code, run = bench(start(reply), tmp_path, *SMALL, "--concurrency", "1,4", "--requests-per-client", "4")

    assert code == 130
    assert [(level.label, len(level.rows), level.unfinished, level.interrupted) for level in run.levels] == [
        ("c=1", 2, 1, True)
    ]
    captured = capsys.readouterr()
    assert "interrupted" in captured.err
    assert "unfinished" in captured.out


def test_a_second_interrupt_does_not_take_the_results_away(start: Start) -> None:
    running: list[subprocess.Popen[str]] = []

    def reply(body: Json, number: int) -> Reply:
        if number > 0:
            running[0].send_signal(signal.SIGINT)
            return Reply((Pause(60),))
        return Reply(WHOLE)

    words = ["--base-url", start(reply).url, *SMALL, "--warmup", "0", "--concurrency", "1,2"]
    command = [sys.executable, ROOT / "scripts" / "bench_serving", *words, "--requests-per-client", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        running.append(process)
        assert process.stderr is not None
        while process.stderr.readline() not in ("interrupted\n", ""):
            pass
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)

    assert process.returncode == 130
    header, requests, *_ = out.splitlines()
    assert (header.split(), requests.split()) == (["c=1", "c=2"], ["requests", "1", "0"])


def test_an_interrupt_before_anything_was_measured_ends_the_run_too(start: Start, tmp_path: Path) -> None:
    def reply(body: Json, number: int) -> Reply:
        os.kill(os.getpid(), signal.SIGINT)
        return Reply((Pause(60),))

    code, run = bench(start(reply), tmp_path, *SMALL, "--concurrency", "2,4", "--warmup", "1")

    assert code == 130
    assert [(level.label, level.rows, level.interrupted) for level in run.levels] == [("c=2", [], True)]


def test_no_server_is_the_operators_mistake(start: Start, tmp_path: Path) -> None:
    server = start(lambda body, number: Reply(WHOLE))
    server.models = {"data": []}
    with pytest.raises(ConfigError, match="lists no model"):
        bench(server, tmp_path)
    server.models = {"detail": "what?"}
    with pytest.raises(ConfigError, match="does not answer with a list of models"):
        bench(server, tmp_path)
    server.models_status = 503
    server.models = {"error": {"message": "The model is still loading."}}
    with pytest.raises(ConfigError, match="/v1/models answers 503: The model is still loading"):
        bench(server, tmp_path)
    server.url = "http://127.0.0.1:1"
    with pytest.raises(ConfigError, match="no server answers"):
        bench(server, tmp_path)
