"""Tokens of spoken text: plain text only, and the same in pieces as in one."""

import random
from collections.abc import Iterable

import pytest

from stages.qwen3_tts.tokens import TextStream, TextToken, TextTokenizer
from tests.spoken_texts import TEXTS
from tests.unit.stages.qwen3_tts.checkpoint import FIRST_SPECIAL_ID, SPECIAL, write_checkpoint

WORDS = (
    "the",
    "quick",
    "iPhone",
    "12",
    "e",
    "é",
    "x",
    "你好",
    "हिन्दी",
    "한",
    "\u1112",
    "\u1161",
    "\u11ab",
    "👍🏽",
)
SIGNS = (".", "，", "!?", "(", "'", "''", "’", "'s", "'ll", "_", "=", "<|im_end|>", "<|", "|>", "<tool_call>")
SPACES = (" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000")
MARKS = ("\u0301", "\u0315", "\u0323", "\u0338")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(write_checkpoint(tmp_path_factory.mktemp("checkpoint")))


def pieces_of(text: str, source: random.Random) -> list[str]:
    pieces = []
    while text:
        size = source.randint(1, 7)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def tokens_of(pieces: Iterable[str], tokenizer: TextTokenizer) -> tuple[int, ...]:
    stream = TextStream(tokenizer)
    found = [token for piece in pieces for token in stream.push(piece)]
    return ids_of([*found, *stream.finish()])


def ids_of(tokens: Iterable[TextToken]) -> tuple[int, ...]:
    return tuple(token.id for token in tokens)


@pytest.mark.parametrize("seed", range(500))
def test_the_tokens_of_a_text_in_pieces_are_those_of_the_whole(seed: int, tokenizer: TextTokenizer) -> None:
    source = random.Random(seed)
    kinds = source.choices((WORDS, SIGNS, SPACES, MARKS), k=source.randint(1, 20))
    text = "".join(source.choice(kind) for kind in kinds)
    assert tokens_of(pieces_of(text, source), tokenizer) == tokenizer.plain_ids(text)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_in_five_scripts_have_the_same_tokens_in_pieces(text: str, tokenizer: TextTokenizer) -> None:
    whole = tokenizer.plain_ids(text)
    for seed in range(20):
        assert tokens_of(pieces_of(text, random.Random(seed)), tokenizer) == whole
    assert tokens_of(text, tokenizer) == whole


@pytest.mark.parametrize("text", ["x\n \nx", "e\u0315\u0301x", "e\u0301\u0301x", "\u1112\u1161\u11ab"])
def test_what_is_written_later_may_change_what_is_before_it(text: str, tokenizer: TextTokenizer) -> None:
    assert tokens_of(text, tokenizer) == tokenizer.plain_ids(text)


def test_tokens_come_as_soon_as_a_word_is_complete(tokenizer: TextTokenizer) -> None:
    stream = TextStream(tokenizer)
    assert stream.push("The quick") == tokenizer.plain_tokens("The")
    assert stream.push("er") == []
    assert stream.push(" ") == tokenizer.plain_tokens(" quicker")
    assert stream.push("fo") == []
    assert stream.push("x.") == tokenizer.plain_tokens(" fox")
    assert stream.finish() == tokenizer.plain_tokens(".")
    assert stream.finish() == []


@pytest.mark.parametrize("text", ["".join(WORDS), "👍🏽 e\u0301 हिन्दी", " the  fox\n"])
def test_tokens_spell_the_text(text: str, tokenizer: TextTokenizer) -> None:
    text = tokenizer.normalized(text)
    tokens = tokenizer.plain_tokens(text)
    assert "".join(token.text for token in tokens) == text
    assert ids_of(tokens) == tokenizer.plain_ids(text)


def test_what_follows_a_flush_begins_anew(tokenizer: TextTokenizer) -> None:
    stream = TextStream(tokenizer)
    assert stream.push("The quick") + stream.finish() == tokenizer.plain_tokens("The quick")
    assert stream.push("er ") == tokenizer.plain_tokens("er")


def test_what_is_too_long_for_a_word_is_not_held(tokenizer: TextTokenizer) -> None:
    stream = TextStream(tokenizer)
    assert not any(stream.push("x") for _ in range(1024))
    assert ids_of(stream.push("x")) == tokenizer.plain_ids(1025 * "x")


@pytest.mark.parametrize("special", SPECIAL)
def test_a_special_token_that_a_text_spells_is_plain_text(special: str, tokenizer: TextTokenizer) -> None:
    ids = tokenizer.plain_ids(f"the {special}\n{special}{special} fox")
    assert max(ids) < FIRST_SPECIAL_ID
    assert tokenizer.template_ids(special) == (FIRST_SPECIAL_ID + SPECIAL.index(special),)


def test_words_are_split_as_the_checkpoint_says_and_not_as_mistrals(tokenizer: TextTokenizer) -> None:
    assert list(tokenizer.last_words("iPhone McDonald")) == [6, 0]
