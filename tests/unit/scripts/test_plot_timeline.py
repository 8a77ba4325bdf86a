"""From a server's log to the picture of one request."""

import importlib.util
import sys
from pathlib import Path

import msgspec
import pytest

from omni_server.errors import ConfigError
from omni_server.types import StageTimes, WindowTimes
from tests.unit.scripts.test_load_scripts import script

SPOKEN = {
    "brain": StageTimes(0.0, 0.013, 0.4),
    "talker": StageTimes(0.02, 0.09, 0.87),
    "code2wav": StageTimes(0.16, 0.26, 0.92, (WindowTimes(0.16, 0.16, 0.26), WindowTimes(0.87, 0.88, 0.92))),
}
PREFIX = "2026-11-21 06:47:53,225 DEBUG omni_server.orchestrator.request_run: request"


def line(name: str, times: dict[str, StageTimes]) -> str:
    return f"{PREFIX} {name}: times {msgspec.json.encode(times).decode()}\n"


def test_spoken_requests_are_found_among_other_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    silent = {"brain": StageTimes(0.0, 0.1, 0.2)}
    log.write_text(f"INFO ready\n{line('a', SPOKEN)}{line('b', silent)}GET / HTTP/1.1\n{line('c', SPOKEN)}")
    assert script("plot_timeline").read_times(log) == {"a": SPOKEN, "c": SPOKEN}


def test_a_log_without_times_says_how_to_get_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO ready\n")
    with pytest.raises(ConfigError, match="--log-level debug"):
        script("plot_timeline").read_times(log)


def test_the_picture_is_a_png_or_the_extra_is_named_that_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, picture = tmp_path / "log", tmp_path / "t.png"
    log.write_text(line("a", SPOKEN))
    monkeypatch.setattr(sys, "argv", ["plot_timeline", str(log), str(picture)])
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(SystemExit, match="the extra 'bench' brings it"):
            script("plot_timeline").main()
        return
    script("plot_timeline").main()
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
