"""`omni-server bench`: the load generator as a command."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_server.cli.main import main
from tests.unit.bench.frames import spoken
from tests.unit.bench.scripted_server import Reply, ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer(lambda body, number: Reply(spoken(8, 40)))
    yield scripted
    scripted.close()


def test_it_measures_a_server(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "run.json"
    words = [
        "bench",
        "--base-url",
        server.url,
        "--text-tokens",
        "8",
        "--codec-tokens",
        "40",
        "--concurrency",
        "2",
    ]

    assert main([*words, "--warmup", "0", "--api-key", "secret", "--json", str(results)]) == 0

    assert capsys.readouterr().out.splitlines()[0].split() == ["c=2"]
    run = json.loads(results.read_text())
    assert run["command"].startswith("omni-server bench --base-url http://127.0.0.1:")
    assert "secret" not in results.read_text()
    assert len(run["levels"][0]["rows"]) == 8


def test_arguments_that_contradict_each_other_are_told_with_the_commands_own_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--server", "openai-text", "--modalities", "text,audio"])

    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[0] == (
        "omni-server bench: error: --server openai-text answers with text only"
    )


def test_no_server_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--base-url", "http://127.0.0.1:9"]) == 2
    assert "omni-server: error: no server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_examples_in_the_help_name_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "omni-server"
    program.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["bench", "--help"])

    assert "\n  omni-server bench --workload W3 --concurrency 1,8,32\n" in capsys.readouterr().out
