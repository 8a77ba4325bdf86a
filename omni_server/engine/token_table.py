"""Converts vLLM's log-probabilities of sampled tokens to ours, each with its exact bytes."""

import re
from functools import lru_cache
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode
from vllm.logprobs import Logprob
from vllm.tokenizers import TokenizerLike

from omni_server.types import SampledToken, TokenLogprob

_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
"""GPT-2's alphabet, in which byte-level vocabularies are written."""
_SPACE, _BYTE_TOKEN = "▁", re.compile("<0x([0-9A-F]{2})>")
"""A space, and a byte, in the vocabularies of SentencePiece."""


class TokenTable:
    """Bytes of single tokens. vLLM's own text of a token that ends inside a character depends on its
    neighbours."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer: Any = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._added: dict[int, str] = {
            token_id: text for text, token_id in self._tokenizer.get_added_vocab().items()
        }
        self._is_byte_level = "Ġ" in self._tokenizer.get_vocab()  # its space
        self._texts = lru_cache(maxsize=65536)(self._text)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def logprob(self, token_id: int, value: float) -> TokenLogprob:
        text, utf8 = self._texts(token_id)
        return TokenLogprob(text, utf8, value)

    def sampled(self, token_id: int, candidates: dict[int, Logprob], num_top: int) -> SampledToken:
        """`candidates` contains the sampled token and the likeliest ones."""
        best = sorted(
            (c.rank, other) for other, c in candidates.items() if c.rank is not None and c.rank <= num_top
        )
        return SampledToken(
            self.logprob(token_id, candidates[token_id].logprob),
            tuple(self.logprob(other, candidates[other].logprob) for _, other in best),
        )

    def _text(self, token_id: int) -> tuple[str, bytes]:
        """Returns the token's text on its own, and its bytes. Special tokens have no bytes."""
        if token_id in self._added:
            text = self._added[token_id]
            return text, b"" if token_id in self._special else text.encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # padding of the vocabulary
            return "", b""
        if (spelled := _BYTE_TOKEN.fullmatch(token)) is not None:
            utf8 = bytes([int(spelled[1], 16)])
        elif self._is_byte_level and all(character in _BYTES for character in token):
            utf8 = bytes(_BYTES[character] for character in token)
        elif self._is_byte_level:
            utf8 = self._tokenizer.decode([token_id]).encode()
        else:
            utf8 = token.replace(_SPACE, " ").encode()
        return utf8.decode(errors="replace"), utf8
