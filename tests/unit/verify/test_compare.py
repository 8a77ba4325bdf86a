"""What counts as equal, as a near tie and as a difference."""

import math
from dataclasses import replace

import numpy as np
import pytest

from omni_server.protocol.reference import Difference
from omni_server.verify.cases import Case
from omni_server.verify.compare import Precision, compare, signal_to_noise_db, token_match
from tests.unit.verify.results import (
    ANSWER,
    FLOAT32,
    PROMPT,
    REFERENCE,
    SPOKEN,
    WAVEFORM,
)

FAR = Difference(index=1, ours=6, reference=9, margin=2.0, largest=20.0)


@pytest.mark.parametrize("what", ["text", "codes"])
def test_another_token_is_a_problem_that_names_place_tokens_and_margin(what: str) -> None:
    reference = replace(REFERENCE, text=(FAR,)) if what == "text" else replace(REFERENCE, codes=(FAR,))
    (problem,) = compare(SPOKEN, ANSWER, reference, FLOAT32).problems
    number = 3 if what == "text" else 2
    assert problem == (
        f"{what}: first difference at token 1 of {number}: 6, reference 9, ahead by 2 of a largest logit of 20"
    )


@pytest.mark.parametrize(
    ("dtype", "margin", "is_near"),
    [
        ("float32", 0.0, True),
        ("float32", 2e-4, True),
        ("float32", 4e-4, False),
        ("float16", 0.07, True),
        ("float16", 0.09, False),
        ("bfloat16", 0.6, True),
        ("bfloat16", 0.7, False),
    ],
)
def test_rounding_of_the_type_decides_what_a_near_tie_is(dtype: str, margin: float, is_near: bool) -> None:
    difference = replace(FAR, margin=margin)
    match = token_match((5, 6, 7), (difference,), dtype)
    assert match.near_ties == ((difference,) if is_near else ())
    assert match.differences == (() if is_near else (difference,))


def test_a_prompt_of_another_length_is_a_problem() -> None:
    result = compare(SPOKEN, ANSWER, replace(REFERENCE, prompt_tokens=8), FLOAT32)
    assert result.problems == ("prompt: 9 tokens, reference 8",)


def test_a_text_to_be_read_must_have_the_same_tokens() -> None:
    case = Case(replace(PROMPT, text="Hello"), "Chelsie")
    assert compare(case, ANSWER, replace(REFERENCE, given_ids=(5, 6, 7)), FLOAT32).problems == ()
    assert compare(case, ANSWER, replace(REFERENCE, given_ids=(5, 6)), FLOAT32).problems == (
        "text to be read: 3 tokens are not the reference's",
    )


@pytest.mark.parametrize(
    ("noise", "dtype", "is_equal"),
    [(1e-5, "float32", True), (5e-3, "float32", False), (5e-3, "float16", True)],
)
def test_a_waveform_may_be_as_noisy_as_its_type_makes_it(noise: float, dtype: str, is_equal: bool) -> None:
    noisy = WAVEFORM + np.float32(noise)
    result = compare(SPOKEN, replace(ANSWER, whole=noisy), REFERENCE, Precision("float32", dtype))
    assert (result.problems == ()) == is_equal


def test_what_is_streamed_may_differ_but_not_be_of_another_length() -> None:
    assert compare(SPOKEN, replace(ANSWER, streamed=0.9 * WAVEFORM), REFERENCE, FLOAT32).problems == ()
    (problem,) = compare(SPOKEN, replace(ANSWER, streamed=WAVEFORM[:-1]), REFERENCE, FLOAT32).problems
    assert problem == "streamed waveform: 959 samples, reference 960"


def test_what_cannot_be_compared_is_said_and_is_no_problem() -> None:
    long = compare(SPOKEN, replace(ANSWER, whole=None), REFERENCE, FLOAT32)
    other_solver = compare(SPOKEN, ANSWER, REFERENCE, Precision("float32", None))
    silent = compare(
        SPOKEN,
        replace(ANSWER, codes=(), whole=None, streamed=np.zeros(0, np.float32)),
        replace(REFERENCE, waveform=np.zeros(0, np.float32)),
        FLOAT32,
    )
    assert [result.problems for result in (long, other_solver, silent)] == [(), (), ()]
    assert [result.left_out[0].split(":")[0] for result in (long, other_solver, silent)] == [
        "waveform in one window",
        "waveform",
        "waveform",
    ]


def test_without_an_answer_of_either_side_a_case_fails_but_does_not_differ() -> None:
    for result in (
        compare(SPOKEN, "no", REFERENCE, FLOAT32),
        compare(SPOKEN, ANSWER, "no", FLOAT32),
    ):
        assert result.failure == "no"
        assert result.problems == ()
        assert not result.agrees


def test_signal_to_noise_of_the_ends_of_its_range() -> None:
    assert signal_to_noise_db(WAVEFORM, WAVEFORM) == math.inf
    assert signal_to_noise_db(0 * WAVEFORM, WAVEFORM) == -math.inf
    assert math.isnan(signal_to_noise_db(WAVEFORM, WAVEFORM[1:]))
    assert signal_to_noise_db(WAVEFORM, 0.9 * WAVEFORM) == pytest.approx(20, abs=0.01)
