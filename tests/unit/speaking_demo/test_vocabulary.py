"""What the tokenizer makes of a text is what the voice says."""

import re

import pytest
from tokenizers import Tokenizer

from scripts.speaking_demo import vocabulary
from scripts.speaking_demo.codes import LONGEST
from scripts.speaking_demo.judge import SENTENCES
from scripts.speaking_demo.rows import unit_of_token

TEXTS = (
    "Hello! How are you?",
    "In 1984 my brother was 12, and 100 or 2000 is more than 7.",
    "The xylograph; it's (quite) odd: 3-4...",
    "GPU and gpu, A B C, a b c.",
    "Grüße, 早上好! 👋🏽",
    "two\nlines\n\nand  two  spaces ",
)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_units_of_a_text_are_those_of_its_tokens(tokenizer: Tokenizer) -> None:
    texts = (*TEXTS, *(answer.text for answer in vocabulary.answers()), *SENTENCES.read_text().splitlines())
    for text in texts:
        ids = ids_of(tokenizer, text)
        assert [unit_of_token()[id_] for id_ in ids] == list(vocabulary.read(text)), text
        assert tokenizer.decode(ids) == text


def test_known_words_are_one_token_with_and_without_space_and_capital(tokenizer: Tokenizer) -> None:
    for word in vocabulary.words():
        for form in {word, word.capitalize(), " " + word, " " + word.capitalize()}:
            (id_,) = ids_of(tokenizer, form)
            assert unit_of_token()[id_] in (word, f"<{word}>"), form  # "A" may be the word or the letter


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("7", ["7"]),
        ("1984", ["19", "84"]),
        ("123", ["1", "23"]),
        ("100", ["100"]),
        ("2000", ["2000"]),
        ("10000", ["1", "00", "00"]),
        ("2026", ["20", "26"]),
        (" 05", ["05"]),
        (" a 12", ["a", "12"]),
    ],
)
def test_numbers_are_read_in_pairs_from_the_right(text: str, units: list[str]) -> None:
    assert list(vocabulary.read(text)) == units


def test_unknown_words_are_spelled() -> None:
    assert list(vocabulary.read("Zyx.")) == ["<z>", "<y>", "<x>", "<.>"]


@pytest.mark.parametrize(
    ("mark", "pause"),
    [(".", "<.>"), ("?", "<.>"), ("!", "<.>"), ("\n", "<.>"), (",", "<,>"), (";", "<,>"), ("%", "< >")],
)
def test_marks_are_pauses(mark: str, pause: str) -> None:
    assert list(vocabulary.read("yes" + mark)) == ["yes", pause]


def unknown_words(text: str) -> set[str]:
    """Those that would be spelled."""
    return set(re.findall(r"[^\W\d_]{2,}(?:'\w+)?", text.lower())) - set(vocabulary.words())


def test_longer_marks_pause_longer() -> None:
    pauses = vocabulary.PAUSES
    assert pauses[vocabulary.NO_PAUSE] < pauses[vocabulary.SHORT_PAUSE] < pauses[vocabulary.LONG_PAUSE]


def test_answers_are_made_of_known_words_and_short_enough_to_be_told_apart() -> None:
    answers = vocabulary.answers()
    assert len(answers) > 80
    for text in (*(answer.text for answer in answers), vocabulary.UNKNOWN, vocabulary.HEARD, vocabulary.SEEN):
        assert unknown_words(text) == set()
        assert len(list(vocabulary.read(text))) <= LONGEST


def test_no_question_has_two_answers() -> None:
    questions = [
        question.rstrip("?.!").lower() for answer in vocabulary.answers() for question in answer.questions
    ]
    assert len(questions) == len(set(questions))


def test_unseen_sentences_are_of_known_words_and_no_answers() -> None:
    sentences = SENTENCES.read_text(encoding="utf-8").splitlines()
    answers = {answer.text for answer in vocabulary.answers()}
    assert len(set(sentences)) == 40
    for sentence in sentences:
        assert sentence not in answers
        assert 5 <= len(sentence.split()) <= 30
        assert unknown_words(sentence) == set()
