"""Tokens of the text that is spoken, also of a text that arrives in pieces."""

import itertools
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

_LONGEST_WORD = 1024
"""Characters that wait for the end of their word: each piece of it costs another look at all of them."""


class TextToken(NamedTuple):
    id: int
    text: str
    """What it spells. A character of several tokens is the last one's."""


class TextTokenizer:
    """The checkpoint's tokenizer. What callers send is plain text, even if it spells a special token."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import Qwen2Tokenizer

        # The published checkpoints have no tokenizer.json. transformers takes their folders for Mistral's,
        # and would fix that.
        loaded: Any = Qwen2Tokenizer.from_pretrained(model_dir, fix_mistral_regex=False)
        self._with_special: Tokenizer = loaded.backend_tokenizer
        self._plain = Tokenizer(self._with_special.model)
        self._plain.normalizer = self._with_special.normalizer
        self._plain.pre_tokenizer = self._with_special.pre_tokenizer

    def template_ids(self, template: str) -> tuple[int, ...]:
        return tuple(self._with_special.encode(template, add_special_tokens=False).ids)

    def plain_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def plain_tokens(self, text: str) -> list[TextToken]:
        encoding = self._plain.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoding.offsets][1:]
        ends = [0, *map(min, starts, (end for _, end in encoding.offsets)), len(text)]
        texts = (text[start:end] for start, end in itertools.pairwise(ends))
        return [TextToken(token, spelled) for token, spelled in zip(encoding.ids, texts, strict=False)]

    def normalized(self, text: str) -> str:
        normalizer = self._plain.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def last_words(self, text: str) -> Iterator[int]:
        """Where each word begins, the last one first. No token is longer than a word."""
        words = self._plain.pre_tokenizer.pre_tokenize_str(text)
        return (start for _, (start, _) in reversed(words))


class TextStream:
    """The tokens are those of the whole text, each as soon as no later text can change it."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._rest = ""

    def push(self, text: str) -> list[TextToken]:
        self._rest = self._tokenizer.normalized(self._rest + text)
        return self._take(self._settled())

    def finish(self) -> list[TextToken]:
        """The tokens of the rest. Text that is pushed after it begins anew."""
        return self._take(len(self._rest))

    def _take(self, end: int) -> list[TextToken]:
        settled, self._rest = self._rest[:end], self._rest[end:]
        return self._tokenizer.plain_tokens(settled)

    def _settled(self) -> int:
        """Where the last word begins, or white space before it: later text may change both. A mark may yet
        be combined with what is before it."""
        for start in self._tokenizer.last_words(self._rest):
            is_mark = unicodedata.category(self._rest[start]).startswith("M")
            if start > 0 and not is_mark and not self._rest[start - 1].isspace():
                return start
        return 0 if len(self._rest) <= _LONGEST_WORD else len(self._rest)
