"""`omni-server verify` on demo checkpoints: a comparison that agrees, one that does not, and Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omni_server.cli.main import main
from omni_server.verify import run
from omni_server.verify.answers import Answer
from omni_server.verify.cases import Case
from stages.qwen3_tts.family import NO_VOICE
from tests.checkpoints.write import make_demo_checkpoint
from tests.omni_families import QWEN3_OMNI
from tests.reference.cases import Case as ReferenceCase
from tests.reference.qwen3_tts import environment
from tests.reference.reference import Reference

TIMEOUT_S = 300
CONFIG = ("--stage-config", "qwen2_5_omni.demo-cpu")


def start(
    checkpoint: Path,
    folder: Path,
    *flags: str,
    config: Sequence[str] = CONFIG,
    python: str | Path = sys.executable,
) -> "subprocess.Popen[str]":
    """In a session of its own, as a terminal would start it."""
    command = [str(python), "-m", "omni_server.cli.entry", "verify", str(checkpoint), *config, *flags]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def members(session: int) -> list[str]:
    """Processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(folder.name)
    return found


def nothing_is_left_of(session: int) -> bool:
    """Python's resource tracker ends a moment after its parent."""
    deadline = time.monotonic() + 20
    while (left := members(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not left


@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("qwen3_omni", ["read aloud"]),
        ("qwen3_tts", ["names and marks"]),
    ],
)
def test_the_report_says_that_the_demo_answers_as_the_reference_does(
    family: str, asked: list[str], tmp_path: Path
) -> None:
    is_tts = family == "qwen3_tts"
    # Of several kinds of Qwen3-TTS, the one with a voice that it clones.
    checkpoint = make_demo_checkpoint(
        tmp_path / "checkpoint", family=family, pipeline="base" if is_tts else None
    )
    voices, python, reference = QWEN3_OMNI.voices, Path(sys.executable), "transformers"
    if is_tts:
        voices, python, reference = (NO_VOICE,), environment() / "bin" / "python", "qwen-tts-hf"
    config = f"{family}.demo-cpu"
    reports = tmp_path / "reports"
    reports.mkdir()
    process = start(
        checkpoint, reports, "--cases", ",".join(asked), config=("--stage-config", config), python=python
    )
    table, progress = process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == 0, progress
    assert "Traceback" not in progress
    assert nothing_is_left_of(process.pid)
    wanted = [[prompt, voice, "equal"] for prompt in asked for voice in voices]
    rows = [re.split(r" {2,}", line) for line in table.splitlines()[1 : 1 + len(wanted)]]
    assert [row[:3] for row in rows] == wanted
    for *_, codes, snr_db, _ in rows:
        equal, total = codes.split(" of ")
        assert int(equal) == int(total) > 20
        assert float(snr_db) > 60
    (report,) = reports.iterdir()
    assert report.name == "omni-server-verify-checkpoint.md"
    text = report.read_text()
    assert f"**This server and {reference} agree in all {len(wanted)} cases" in text
    assert f"| stage config | {config}, below |" in text
    assert "- prompts that --cases left out or that need speech: " in text
    for private in (str(tmp_path), str(Path.home()), os.uname().nodename):
        assert private not in text


def answers_of_the_reference(checkpoint: Path, cases: Sequence[Case]) -> list[Answer]:
    """What the reference generates, instead of the answers of engines."""
    reference = Reference(checkpoint)
    answers: list[Answer] = []
    for case in cases:
        prompt, is_spoken = case.prompt, case.voice is not None
        messages = reference.spoken_messages(prompt.messages) if is_spoken else prompt.messages
        asked = ReferenceCase(
            case.name,
            messages,
            case.voice or "Chelsie",
            prompt.max_text_tokens,
            prompt.max_codes if is_spoken else 1,
        )
        result = reference.run(asked)
        waveform = result.waveform if is_spoken else np.zeros(0, np.float32)
        answers.append(
            Answer(
                len(result.prompt_ids),
                result.text_ids,
                result.codes if is_spoken else (),
                waveform,
                waveform if is_spoken else None,
            )
        )
    return answers


def test_what_is_altered_is_found_and_named(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reference_answers: list[Answer],
) -> None:
    """Of three answers two are; the third agrees."""
    written, chelsie, ethan = reference_answers
    text_ids, codes = list(written.text_ids), list(ethan.codes)
    text_ids[2], codes[4] = text_ids[3], codes[5]
    answers = [
        replace(written, text_ids=tuple(text_ids)),
        chelsie,
        replace(ethan, codes=tuple(codes)),
    ]
    monkeypatch.setattr(run, "answer_all", lambda *_, **__: answers)
    report = tmp_path / "report.md"

    assert main(["verify", str(checkpoint), *CONFIG, "--cases", "text", "--report", str(report)]) == 1
    assert "DIFFER in 2 of 3 cases: text, text only; text, Ethan." in capsys.readouterr().out
    text = report.read_text()
    assert "- text, text only: text: first difference at token 2 of " in text
    assert "- text, Ethan: codes: first difference at token 4 of " in text
    assert "- text, Ethan: waveform: " in text, "these codes sound otherwise"


@pytest.fixture(scope="module")
def reference_answers(checkpoint: Path) -> list[Answer]:
    prompt = run.all_prompts(lambda _: ())[0]
    return answers_of_the_reference(checkpoint, [Case(prompt, voice) for voice in (None, "Chelsie", "Ethan")])


@pytest.mark.parametrize(
    ("moment", "number"),
    [("code2wav: starting", signal.SIGINT), ("transformers, 1 of", signal.SIGTERM)],
    ids=["Ctrl-C while engines start", "SIGTERM while transformers works"],
)
def test_it_can_be_ended_at_any_time_and_leaves_nothing(
    moment: str, number: signal.Signals, checkpoint: Path, tmp_path: Path
) -> None:
    process = start(checkpoint, tmp_path, "--cases", "1")
    assert process.stderr is not None
    said = ""
    while moment not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal sends it to the whole group
    else:
        process.send_signal(number)
    _, rest = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "Traceback" not in said + rest
    assert nothing_is_left_of(process.pid)
    assert not list(tmp_path.iterdir())
