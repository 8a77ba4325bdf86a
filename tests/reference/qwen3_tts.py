"""What the reference implementation of Qwen3-TTS answers, in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.checkpoints.qwen3_tts.config import KINDS
from tests.checkpoints.qwen3_tts.sizes import SIZES
from tests.checkpoints.write import make_demo_checkpoint
from tests.reference.qwen3_tts_cases import TTSCase
from tests.reference.shared_answers import SharedAnswers

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = "tests.reference.qwen3_tts_reference"
_TIMEOUT_S = 600

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]
Task = dict[str, object]
"""What `_PROGRAM` gets in a list."""


@dataclass(frozen=True)
class Spoken:
    """P: rows of the talker's prompt; N: frames; W: the talker's width."""

    text_ids: Integers
    """Of the whole assistant turn that is in the prompt, and of the turn that it opens."""
    prompt_rows: Floats  # [P, W]
    frame_rows: Floats
    """[N, W], what the talker gets after each frame: the sum of its codes and of a text token."""
    codes: Integers  # [N, 16], the end code excluded
    has_ended: bool
    """Whether the end code follows the frames. Otherwise there are `max_frames`."""
    waveform: Doubles  # [1920 N], of one pass
    min_top2_gap: float
    """Smallest distance of the best from the second best processed logit, over all steps of talker and code
    predictor."""

    @classmethod
    def of(cls, arrays: Arrays, name: str) -> "Spoken":
        return cls(
            text_ids=arrays[f"{name}.text_ids"],
            prompt_rows=arrays[f"{name}.prompt_rows"],
            frame_rows=arrays[f"{name}.frame_rows"],
            codes=arrays[f"{name}.codes"],
            has_ended=bool(arrays[f"{name}.has_ended"]),
            waveform=arrays[f"{name}.waveform"],
            min_top2_gap=float(arrays[f"{name}.min_top2_gap"]),
        )


@dataclass(frozen=True)
class Heard:
    """A voice in audio."""

    vector: Floats  # [W]
    codes: Integers  # [frames, 16]


def write_checkpoints(folder: Path) -> None:
    """Write those of all cases; see `TTSCase.checkpoint`."""
    for size in SIZES:
        for kind in KINDS:
            make_demo_checkpoint(folder / f"{size}.{kind}", family="qwen3_tts", size=size, pipeline=kind)


class Qwen3TTSReference:
    def __init__(self, checkpoints: Path, answer_folder: Path | None = None) -> None:
        """`checkpoints`: see `write_checkpoints`; `answer_folder`: see `SharedAnswers`."""
        self._checkpoints = checkpoints
        self._answers = SharedAnswers(checkpoints, answer_folder)
        self._program: _Program | None = None
        """Runs from the first question on, and keeps what it has loaded."""

    def close(self) -> None:
        if self._program is not None:
            self._program.close()

    def answers_of(self, cases: Iterable[TTSCase]) -> dict[str, Spoken]:
        """By the cases' names. Computed in batches: one call with many cases is much faster than many
        calls."""
        batches: dict[tuple[str, bool, int], list[TTSCase]] = defaultdict(list)
        for case in cases:
            batches[case.checkpoint, case.streams_text, case.min_frames].append(case)
        return self._spoken(list(batches.values()))

    def answers_alone(self, cases: Iterable[TTSCase]) -> dict[str, Spoken]:
        """As `answers_of`, but one by one."""
        return self._spoken([[case] for case in cases])

    def voices_in(self, checkpoint: str, recordings: Sequence[Floats]) -> list[Heard]:
        """What a base checkpoint hears in each; they have 24 kHz."""
        task: Task = {"checkpoint": checkpoint, "hear": [samples.tolist() for samples in recordings]}
        arrays = self._arrays([task])
        return [Heard(arrays[f"{i}.vector"], arrays[f"{i}.codes"]) for i in range(len(recordings))]

    def waveform_of(self, checkpoint: str, codes: Integers) -> Doubles:
        """Of frames [N, 16], in one pass."""
        return self._arrays([{"checkpoint": checkpoint, "decode": codes.tolist()}])[".waveform"]

    def mistaken(self, cases: Mapping[str, TTSCase]) -> dict[str, Spoken]:
        """The answers with one mistake each (`tests.reference.qwen3_tts_wrong`), by its name."""
        tasks: list[Task] = [
            {"checkpoint": case.checkpoint, "mistake": mistake, "ask": self._question(case)}
            for mistake, case in cases.items()
        ]
        arrays = self._arrays(tasks)
        return {mistake: Spoken.of(arrays, mistake) for mistake in cases}

    def _spoken(self, batches: list[list[TTSCase]]) -> dict[str, Spoken]:
        tasks: list[Task] = [
            {"checkpoint": batch[0].checkpoint, "speak": [self._question(case) for case in batch]}
            for batch in batches
        ]
        arrays = self._arrays(tasks)
        return {case.name: Spoken.of(arrays, case.name) for batch in batches for case in batch}

    def _arrays(self, tasks: list[Task]) -> Arrays:
        return self._answers.get(tasks, lambda: self._run(tasks))

    def _run(self, tasks: list[Task]) -> Arrays:
        located = [task | {"checkpoint": f"{self._checkpoints}/{task['checkpoint']}"} for task in tasks]
        if self._program is None:
            self._program = _Program()
        with tempfile.TemporaryDirectory() as folder:
            questions, answers = Path(folder) / "questions.json", Path(folder) / "answers.npz"
            questions.write_text(json.dumps(located))
            self._program.run(questions, answers)
            with np.load(answers) as arrays:
                return dict(arrays)

    def _question(self, case: TTSCase) -> dict[str, object]:
        question = asdict(case)
        if case.clone is not None:
            config = json.loads((self._checkpoints / case.checkpoint / "config.json").read_text())
            width = config["talker_config"]["hidden_size"]
            question["clone"] |= {"vector": case.clone.vector(width), "codes": case.clone.codes()}
        return question


class _Program:
    """One process for all questions: it takes seconds to import the reference."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            [environment() / "bin" / "python", "-m", _PROGRAM],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_outside(),
        )

    def run(self, questions: Path, answers: Path) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = threading.Timer(_TIMEOUT_S, process.kill)
        deadline.start()
        try:
            process.stdin.write(f"{json.dumps([str(questions), str(answers)])}\n")
            process.stdin.flush()
            # Packages print, too.
            while (line := process.stdout.readline()) != "answered\n":
                assert line, self._said()
        except BrokenPipeError:
            raise AssertionError(self._said()) from None
        finally:
            deadline.cancel()

    def close(self) -> None:
        self._process.communicate(timeout=_TIMEOUT_S)
        self._errors.close()

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-5000:]


def environment() -> Path:
    """That of the reference, made the first time."""
    finished = subprocess.run(
        [_ROOT / "scripts" / "setup-consumers", sys.executable, "qwen-tts"],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=_outside(),
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-5000:]
    return _ROOT / finished.stdout.strip() / "qwen-tts"


def _outside() -> dict[str, str]:
    """The variables of a program outside of this environment."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
