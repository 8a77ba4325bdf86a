"""Runs of `--workload images`, against a server whose images are known."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image
from pydantic import JsonValue

from benchmarks import summarize
from tests.unit.bench.frames import frame
from tests.unit.bench.scripted_server import Json, Pause, Reply, Start
from tests.unit.bench.test_main import bench

IMAGES = ("--workload", "images", "--concurrency")
ONE = (*IMAGES, "1", "--requests-per-client", "1")


def png(width: int = 32, height: int = 32) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def event(name: str, data: str, **more: JsonValue) -> bytes:
    name = f"image_generation.{name}"
    return f"event: {name}\n".encode() + frame({"type": name, "b64_json": data, **more})


STEP = b": keep-alive\n\n"
PREVIEW = event("partial_image", png(), partial_image_index=0)
DONE = event("completed", png())
WHOLE = (STEP, PREVIEW, STEP, DONE)


def test_callers_are_measured_by_preview_and_image(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(lambda body, number: Reply((STEP, PREVIEW, Pause(0.1), STEP, DONE)))

    code, run = bench(server, tmp_path, *IMAGES, "1,3", "--requests-per-client", "2")

    assert code == 0
    assert [(level.label, len(level.rows), level.failures) for level in run.levels] == [
        ("c=1", 2, []),
        ("c=3", 6, []),
    ]
    assert 1 < server.peak_in_flight <= 3
    for row in (row for level in run.levels for row in level.rows):
        assert row.previews == 1
        assert row.preview_s is not None
        assert 0 < row.preview_s <= row.end_to_end_s - 0.09
    captured = capsys.readouterr()
    names = [line.split("  ")[0] for line in captured.out.splitlines()[1:6]]
    assert names == ["requests", "failures", "preview s", "end to end s", "images/s"]
    assert "images against scripted" in captured.err

    (measured, _) = summarize.lines(tmp_path / "run.json", run)
    assert (measured["workload"], measured["output"]) == ("images", "image")
    assert 0 < float(measured["preview_p50_s"]) < float(measured["end_to_end_p50_s"])


def test_only_what_the_command_line_says_is_asked_for(start: Start, tmp_path: Path) -> None:
    server = start(lambda body, number: Reply((event("completed", png(48, 32)),)))

    bench(server, tmp_path, *ONE)
    bench(server, tmp_path, *ONE, "--size", "48x32", "--steps", "7", "--partial-images", "0")

    default, chosen = server.requests
    prompt = default.pop("prompt")
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 20
    assert default == {"model": "scripted", "stream": True, "partial_images": 1}
    assert chosen.pop("prompt") != prompt
    assert chosen == {
        "model": "scripted",
        "stream": True,
        "partial_images": 0,
        "size": "48x32",
        "num_inference_steps": 7,
    }


def test_image_without_a_preview_is_no_failure(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(lambda body, number: Reply((STEP, DONE)))

    code, run = bench(server, tmp_path, *ONE)

    assert (code, run.levels[0].preview_s, run.levels[0].rows[0].previews) == (0, None, 0)
    assert "without any text" not in capsys.readouterr().out


FAILURES = {
    "HTTP 400: no previews": Reply(status=400, body=b'{"error": {"message": "no previews"}}'),
    "error in the stream: out of memory": Reply((STEP, frame({"error": {"message": "out of memory"}}))),
    "not an event of an image: event: json_invalid": Reply((STEP, b"data: what?\n\n")),
    "the connection broke in the middle of the answer": Reply((STEP, PREVIEW), break_off=True),
    "0 images instead of 1": Reply((STEP, PREVIEW)),
    "2 images instead of 1": Reply((STEP, DONE, DONE)),
    "an image of 48x32 instead of 32x32": Reply((event("completed", png(48, 32)),)),
    "an image that is not a PNG": Reply((event("completed", base64.b64encode(b"GIF89a").decode()),)),
    "an image that is not base64": Reply((event("completed", "%"),)),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_an_answer_that_is_not_the_image_asked_for_fails(reason: str, start: Start, tmp_path: Path) -> None:
    def reply(body: Json, number: int) -> Reply:
        return Reply(WHOLE) if number == 0 else FAILURES[reason]

    code, run = bench(start(reply), tmp_path, *IMAGES, "1", "--requests-per-client", "3", "--size", "32x32")

    assert code == 1
    assert run.levels[0].failures == [reason, reason]
