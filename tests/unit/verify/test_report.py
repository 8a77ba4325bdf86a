"""The report: what it says, what it keeps to itself, and where it is written."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.errors import ConfigError
from omni_server.verify.compare import CaseResult, compare
from omni_server.verify.report import (
    Report,
    as_markdown,
    new_report_file,
    verdict,
    without_personal_data,
)
from tests.unit.verify.results import ANSWER, FLOAT32, REFERENCE, SPOKEN, WRITTEN

FOLDER = Path("/home/Jane Doe/models/mine")


def report(*results: CaseResult) -> Report:
    return Report(
        model="mine",
        facts=(("omni-server", "1.2.3"), ("machine", "a processor")),
        stage_config_name=None,
        stage_config=load_stage_config(find_shipped_config("qwen2_5_omni.demo-cpu")),
        precision=FLOAT32,
        reference="transformers",
        reference_device="cpu",
        results=results,
        left_out=("sampling: all is greedy",),
        folders=(FOLDER,),
    )


EQUAL = compare(SPOKEN, ANSWER, REFERENCE, FLOAT32)
DIFFERENT = compare(SPOKEN, ANSWER, replace(REFERENCE, prompt_tokens=8), FLOAT32)
FAILED = compare(WRITTEN, f"{FOLDER}/config.json is broken", REFERENCE, FLOAT32)


def test_the_verdict_names_the_cases_that_differ() -> None:
    assert not report(EQUAL, DIFFERENT).agrees
    assert verdict(report(EQUAL, DIFFERENT)) == (
        "This server and transformers DIFFER in 1 of 2 cases: text, Chelsie."
    )


def test_what_could_not_be_compared_is_not_called_different() -> None:
    assert not report(EQUAL, FAILED).agrees
    assert verdict(report(EQUAL, FAILED)) == "NOT COMPARED are 1 of 2 cases: text, text only."


def test_the_report_names_no_folder() -> None:
    text = as_markdown(report(EQUAL, FAILED))
    assert "- text, text only: config.json is broken" in text
    assert "Jane" not in text


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("cannot read /home/me/models/config.json: no", "cannot read config.json: no"),
        ("see ~/models/a.txt and ~me/b", "see a.txt and b"),
        ("'/opt/x/y' (file:///srv/z/w)", "'y' (w)"),
        ("Qwen/Qwen2.5-Omni-7B, https://hub.co/x", "Qwen/Qwen2.5-Omni-7B, https://hub.co/x"),
        ("3 / 4, and/or", "3 / 4, and/or"),
        (f"{FOLDER} is gone", "mine is gone"),
        (f"{Path.cwd()}/x", "x"),
    ],
)
def test_paths_are_cut_to_their_last_part(text: str, rest: str) -> None:
    assert without_personal_data(text, [FOLDER]) == rest


def test_the_host_name_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "janes-box")
    assert without_personal_data("no route to janes-box:80", []) == "no route to HOST:80"


def test_no_report_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = []
    for text in ("one", "two", "three"):
        with new_report_file(None, "Qwen/My Model") as file:
            file.write_text(text)
            written.append(str(file))
    assert written == [f"omni-server-verify-My-Model{number}.md" for number in ("", "-2", "-3")]
    assert Path(written[0]).read_text() == "one"


def test_a_named_report_must_not_exist(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    with new_report_file(file, "m") as created:
        assert created == file
    with pytest.raises(ConfigError, match=r"report\.md exists"), new_report_file(file, "m"):
        pytest.fail("it was given")


def test_a_report_that_cannot_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    file = tmp_path / "none" / "report.md"
    message = "cannot be written: No such file or directory"
    with pytest.raises(ConfigError, match=message), new_report_file(file, "m"):
        pytest.fail("it was given")


def test_nothing_is_left_of_a_report_that_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_report_file(tmp_path / "report.md", "m"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
