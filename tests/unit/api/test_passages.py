"""Long texts in passages."""

import math
import re

import pytest

from omni_server.api import speech as module


def passages(text: str, longest_speech_s: float = math.inf) -> list[str]:
    return module.passages(text, longest_speech_s)


SENTENCE = "The quick brown fox jumps over the lazy dog. "


def test_a_model_may_have_a_limit_of_its_own() -> None:
    found = module.passages(SENTENCE * 10, math.inf, 100)
    assert len(found) == 5
    assert all(len(passage) <= 100 for passage in found)


def without_space(text: str) -> str:
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("text", ["", " ", "\n\t\u2003"])
def test_blank_text_has_no_passage(text: str) -> None:
    assert passages(text) == []


@pytest.mark.parametrize("text", ["a", "Two. Sentences.", "a\n\nb", "x" * 600, "语" * 200, "7" * 120])
def test_text_that_fits_stays_as_it_is(text: str) -> None:
    assert passages(f"  {text}\n") == [text]


def test_sentences_stay_whole() -> None:
    found = passages(SENTENCE * 60)
    assert len(found) > 3
    assert all(passage.endswith("dog.") and len(passage) <= 600 for passage in found)


def test_paragraphs_are_the_best_place_to_cut() -> None:
    first = (SENTENCE * 9).strip()
    assert passages(first + "\n\n" + SENTENCE * 9)[0] == first


def test_sentences_without_spaces_are_cut_behind_their_stops() -> None:
    sentence = "今天天气很好，我们去公园散步吧。"
    found = passages(sentence * 40)
    assert all(passage.endswith("。") and len(passage) <= 200 for passage in found)
    assert "".join(found) == sentence * 40


@pytest.mark.parametrize(
    "text",
    [
        "word " * 800,
        "clause, " * 500,
        "x" * 4096,
        "3" * 4096,
        "语" * 4096,
        "👨‍👩‍👧‍👦" * 500,
        "e\u0301" * 2000,
        ". " * 2000,
        "a" * 599 + " " + "b" * 599 + "\n\n" + "c" * 1000,
    ],
)
def test_nothing_but_space_is_lost(text: str) -> None:
    found = passages(text)
    assert without_space("".join(found)) == without_space(text)
    assert all(passage and passage == passage.strip() and len(passage) <= 600 for passage in found)


@pytest.mark.parametrize("character", ["e\u0301", "👋🏽", "👨‍👩‍👧‍👦", "क्षि"])
def test_a_cut_inside_a_word_leaves_characters_whole(character: str) -> None:
    found = passages(character * 700)
    assert len(found) > 1
    assert all(passage == character * (len(passage) // len(character)) for passage in found)


def test_passages_are_as_short_as_the_talkers_limit_wants_them() -> None:
    found = passages(SENTENCE * 20, longest_speech_s=30.0)
    assert all(100 < len(passage) <= 225 for passage in found)
    assert " ".join(found) == (SENTENCE * 20).strip()


def test_a_limit_of_almost_nothing_still_leaves_passages() -> None:
    assert passages("abc", longest_speech_s=0.02) == ["a", "b", "c"]
