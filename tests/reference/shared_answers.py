"""Answers of a reference that all processes of a test run share."""

import fcntl
import hashlib
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

QuestionT = TypeVar("QuestionT")
T = TypeVar("T")


class SharedAnswers:
    """Those of one checkpoint. The first process that asks a question computes the answer and writes it into
    a folder; others that ask it meanwhile wait."""

    def __init__(self, model_dir: Path, folder: Path | None) -> None:
        """`folder` is one of this test run, so that no answer outlives the code that gave it. Without a
        folder nothing is shared, and each answer is computed."""
        self._folder = folder
        self._checkpoint = "" if folder is None else digest(model_dir)

    def get_all(self, questions: Mapping[str, QuestionT], answer: Callable[[QuestionT], T]) -> dict[str, T]:
        """As `get`. Processes that ask the same questions at the same time share the work: each computes what
        no other one does at the moment."""
        found: dict[str, T] = {}
        for waits in (False, True):
            for name in [name for name in questions if name not in found]:
                with suppress(BlockingIOError):
                    found[name] = self.get(questions[name], partial(answer, questions[name]), waits=waits)
        return {name: found[name] for name in questions}

    def get(self, question: object, answer: Callable[[], T], *, waits: bool = True) -> T:
        """The answer to `question`; both are values that `pickle` writes. Raises `BlockingIOError` if another
        process computes it, unless it `waits`."""
        if self._folder is None:
            return answer()
        file = self._folder / hashlib.sha256(pickle.dumps((self._checkpoint, question))).hexdigest()
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not file.exists():
                written = file.with_suffix(".part")  # a process that is killed leaves no half of an answer
                written.write_bytes(pickle.dumps(answer()))
                written.rename(file)
        shared: T = pickle.loads(file.read_bytes())  # noqa: S301 - this run wrote it
        return shared


def digest(model_dir: Path) -> str:
    """Of the names and contents of all files: a changed configuration makes another checkpoint, too."""
    files = sorted(path for path in model_dir.rglob("*") if path.is_file())
    parts = [(str(file.relative_to(model_dir)), hashlib.sha256(file.read_bytes()).digest()) for file in files]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
