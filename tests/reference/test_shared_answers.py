"""An answer is shared between those that ask the same question of the same checkpoint, and with nobody else."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.reference.cases import CASES, Case
from tests.reference.shared_answers import SharedAnswers

HELLO = CASES["hello"]


def answers_of(folder: Path, checkpoint: str = "weights") -> SharedAnswers:
    model_dir = folder / checkpoint
    model_dir.mkdir(exist_ok=True)
    (model_dir / "model.safetensors").write_text(checkpoint)
    return SharedAnswers(model_dir, folder)


@pytest.mark.parametrize(
    "other",
    [
        replace(HELLO, name="other"),
        replace(HELLO, messages=CASES["mixed"].messages),
        replace(HELLO, stop_at=0),
        replace(HELLO, ignore_eos=True),
    ],
)
def test_an_answer_is_that_of_its_case_and_its_checkpoint(other: Case, tmp_path: Path) -> None:
    answers = answers_of(tmp_path)
    assert answers.get(HELLO, lambda: "first") == "first"
    assert answers_of(tmp_path).get(replace(HELLO), lambda: "second") == "first"
    assert answers.get(other, lambda: "second") == "second"
    assert answers_of(tmp_path, "other weights").get(HELLO, lambda: "second") == "second"


def test_those_that_ask_at_once_cause_one_computation_and_failures_are_not_kept(tmp_path: Path) -> None:
    computed: list[int] = []

    def answer() -> int:
        computed.append(len(computed))
        return computed[-1]

    answers = answers_of(tmp_path)
    with pytest.raises(ZeroDivisionError):
        answers.get(HELLO, lambda: 1 // 0)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: answers.get(HELLO, answer), range(32))) == [0] * 32
    assert computed == [0]
