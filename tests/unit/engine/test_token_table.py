"""Bytes and log-probabilities of single tokens."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.logprobs import Logprob

from omni_server.engine.token_table import TokenTable
from tests.checkpoints.spoken_llm.tokens import write_sentencepiece_tokenizer
from tests.checkpoints.write import make_demo_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint"))


@pytest.fixture
def table(tokenizer: Any) -> TokenTable:
    return TokenTable(tokenizer)


def test_a_piece_of_a_character_has_its_bytes_and_a_replacement_as_text(
    tokenizer: Any, table: TokenTable
) -> None:
    pieces = [table.logprob(token_id, -1.0) for token_id in tokenizer.encode("👋", add_special_tokens=False)]
    assert len(pieces) > 1
    assert b"".join(piece.utf8 for piece in pieces) == "👋".encode()
    assert all(piece.text == "\ufffd" for piece in pieces)


def test_a_special_token_has_a_name_and_no_bytes(tokenizer: Any, table: TokenTable) -> None:
    got = table.logprob(tokenizer.convert_tokens_to_ids("<|im_end|>"), -1.0)
    assert (got.text, got.utf8) == ("<|im_end|>", b"")


def test_an_id_without_a_token_is_nothing(tokenizer: Any, table: TokenTable) -> None:
    got = table.logprob(len(tokenizer) + 5, -1.0)
    assert (got.text, got.utf8) == ("", b"")


def test_the_likeliest_tokens_come_first_and_are_as_many_as_were_asked_for(
    tokenizer: Any, table: TokenTable
) -> None:
    a, b, c = (tokenizer.encode(word, add_special_tokens=False)[0] for word in (".", ",", "!"))
    candidates = {c: Logprob(-3.0, rank=7), b: Logprob(-2.0, rank=2), a: Logprob(-1.0, rank=1)}
    got = table.sampled(c, candidates, 2)
    assert (got.sampled.text, got.sampled.logprob) == ("!", -3.0)
    assert [(token.text, token.logprob) for token in got.top] == [(".", -1.0), (",", -2.0)]
    assert table.sampled(c, candidates, 0).top == ()


def test_spaces_and_bytes_of_sentencepiece_are_what_they_stand_for(tmp_path: Path) -> None:
    write_sentencepiece_tokenizer(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    table = TokenTable(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["▁hello", "<0xC3>", "a"])
    assert [table.logprob(token_id, 0.0).utf8 for token_id in ids] == [b" hello", b"\xc3", b"a"]


def test_accents_of_sentencepiece_are_no_bytes() -> None:
    """They are in GPT-2's alphabet, too."""
    words = Tokenizer(WordLevel({"né": 0, "▁é": 1}, unk_token="né"))
    table = TokenTable(PreTrainedTokenizerFast(tokenizer_object=words))
    assert [table.logprob(token_id, 0.0).utf8.decode() for token_id in (0, 1)] == ["né", " é"]
