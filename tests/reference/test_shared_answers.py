"""An answer is shared between those that ask the same question of the same checkpoint, and with nobody else."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from tests.reference.cases import CASES, Case
from tests.reference.shared_answers import SharedAnswers

HELLO = CASES["hello"]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "answers").mkdir()
    return tmp_path / "answers"


def checkpoint(folder: Path, weights: str = "weights", config: str = "{}") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_text(weights)
    (folder / "config.json").write_text(config)
    return folder


def test_the_first_answer_is_kept_for_equal_checkpoints_and_cases(
    model_dir: Path, folder: Path, tmp_path: Path
) -> None:
    assert SharedAnswers(model_dir, folder).get(HELLO, lambda: "first") == "first"
    equal = checkpoint(tmp_path / "equal")
    assert SharedAnswers(equal, folder).get(replace(HELLO), lambda: "second") == "first"


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"messages": CASES["mixed"].messages},
        {"voice": "Ethan"},
        {"thinker_max_tokens": 3},
        {"talker_max_tokens": 3},
        {"stop_at": 0},
        {"ignore_eos": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_case_has_its_own_answer(model_dir: Path, folder: Path, changes: dict[str, object]) -> None:
    answers = SharedAnswers(model_dir, folder)
    answers.get(HELLO, lambda: "first")
    assert answers.get(replace(HELLO, **changes), lambda: "second") == "second"


@pytest.mark.parametrize(
    "other", [{"weights": "others"}, {"config": '{"eps": 0}'}], ids=["weights", "config"]
)
def test_another_checkpoint_has_its_own_answers(
    model_dir: Path, folder: Path, tmp_path: Path, other: dict[str, str]
) -> None:
    SharedAnswers(model_dir, folder).get(HELLO, lambda: "first")
    answers = SharedAnswers(checkpoint(tmp_path / "other", **other), folder)
    assert answers.get(HELLO, lambda: "second") == "second"


def test_another_run_computes_again(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """The folder is a run's own; without one nothing is kept."""
    SharedAnswers(model_dir, folder).get(HELLO, lambda: "first")
    (tmp_path / "later").mkdir()
    assert SharedAnswers(model_dir, tmp_path / "later").get(HELLO, lambda: "second") == "second"
    assert SharedAnswers(model_dir, None).get(HELLO, lambda: "third") == "third"


def test_the_folder_is_one_of_this_run(answer_folder: Path, tmp_path: Path) -> None:
    assert answer_folder.parent in tmp_path.parents


def test_a_failure_is_kept_for_nobody(model_dir: Path, folder: Path) -> None:
    answers = SharedAnswers(model_dir, folder)
    with pytest.raises(ZeroDivisionError):
        answers.get(HELLO, lambda: 1 // 0)
    assert answers.get(HELLO, lambda: 2) == 2


def test_those_that_ask_at_once_cause_one_computation(model_dir: Path, folder: Path) -> None:
    computed: list[int] = []

    def answer() -> int:
        computed.append(len(computed))
        return computed[-1]

    def ask(_: int) -> int:
        return SharedAnswers(model_dir, folder).get(HELLO, answer)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(32))) == [0] * 32
    assert computed == [0]


def test_processes_with_the_same_questions_share_the_work(model_dir: Path, folder: Path) -> None:
    """Two are asked of two at once; each computes one, and waits in it until the other one computes, too."""
    meeting = Barrier(2, timeout=60)

    def answer(case: Case) -> str:
        meeting.wait()
        return case.name

    def ask(_: int) -> dict[str, str]:
        cases = {name: CASES[name] for name in ("hello", "mixed")}
        return SharedAnswers(model_dir, folder).get_all(cases, answer)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, range(2))) == [{"hello": "hello", "mixed": "mixed"}] * 2
