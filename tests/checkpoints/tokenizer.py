"""Tokenizer of demo checkpoints: Qwen's byte-level BPE with a vocabulary of whole words.

Merges are built rather than trained: each word is assembled from its first letter on, and words with a
leading space precede those without. So every listed word is exactly one token, any other text falls back to
bytes, and the result does not depend on a trainer's version.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.checkpoints.json_files import dump
from tests.checkpoints.words import BARE, PROMPTED, PUNCTUATION, SPOKEN

Vocabulary = Literal["small", "full"]

GENUINE_VOCAB_SIZE = 152064
"""Rows of the embedding in the families' genuine models."""

# transformers/models/qwen2/tokenization_qwen2.py, PRETOKENIZE_REGEX
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
SPACE = "Ġ"  # the byte-level alphabet's sign for a space

_GENUINE_WORD_IDS = {"user": 872, "system": 8948, "assistant": 77091}
_GENUINE_PLAIN_TOKENS = 151643


@dataclass(frozen=True)
class TokenizerLayout:
    """What differs between families."""

    added: tuple[tuple[str, bool], ...]
    """Added tokens, in the order of their ids, which follow the plain tokens'. True: special, left out of
    decoded text."""
    named: Mapping[str, str]
    """Attributes of the tokenizer that the family's processor reads."""
    chat_template: str | None
    processor_class: str
    more_words: tuple[str, ...] = ()
    """Further single tokens, never generated."""

    def added_ids(self, vocab: Mapping[str, int]) -> dict[str, int]:
        return {content: len(vocab) + i for i, (content, _) in enumerate(self.added)}


def write_words_tokenizer(folder: Path, vocabulary: Vocabulary, layout: TokenizerLayout) -> dict[str, int]:
    """Write the tokenizer's files and the chat template, if there is one; returns the plain tokens' ids.

    "small" packs all ids without gaps; "full" puts added tokens and roles where the genuine tokenizer has
    them and fills the rest with unreachable entries.
    """
    vocab, merges = _plain_vocabulary(layout.more_words)
    if vocabulary == "full":
        vocab = _spread_to_genuine_ids(vocab)
    tokenizer = _tokenizer(models.BPE(vocab=vocab, merges=merges), _SPLIT, layout)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write_tokenizer_config(folder, layout.added_ids(vocab), "Qwen2Tokenizer", layout)
    if layout.chat_template is not None:
        dump(folder / "chat_template.json", {"chat_template": layout.chat_template}, ensure_ascii=False)
    dump(folder / "vocab.json", vocab, indent=None, ensure_ascii=False)
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8"
    )
    dump(folder / "added_tokens.json", layout.added_ids(vocab), ensure_ascii=False)
    return vocab


def spoken_ids(vocab: Mapping[str, int]) -> tuple[int, ...]:
    """The tokens that a checkpoint of `write_words_tokenizer` may generate."""
    return tuple(sorted([vocab[SPACE + word] for word in SPOKEN] + [vocab[mark] for mark in PUNCTUATION]))


def padded_vocab_size(num_ids: int) -> int:
    """Rows of the embedding for packed ids."""
    return -(-num_ids // 64) * 64


def _byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte, in the order of its ids 0..255 (so that a newline is
    198)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    moved = 256 - len(kept)
    return [chr(b) for b in kept] + [chr(256 + i) for i in range(moved)]


def _plain_vocabulary(more_words: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    vocab = {character: i for i, character in enumerate(_byte_alphabet())}
    merges: list[tuple[str, str]] = []
    for word in [*(SPACE + w for w in (*SPOKEN, *PROMPTED)), *BARE, *more_words]:
        for end in range(1, len(word)):
            longer = word[: end + 1]
            if longer not in vocab:
                vocab[longer] = len(vocab)
                merges.append((word[:end], word[end]))
    return vocab, merges


def _spread_to_genuine_ids(vocab: dict[str, int]) -> dict[str, int]:
    taken = set(_GENUINE_WORD_IDS.values())
    free = iter(i for i in range(_GENUINE_PLAIN_TOKENS) if i not in taken)
    spread = {
        token: _GENUINE_WORD_IDS[token] if token in _GENUINE_WORD_IDS else next(free) for token in vocab
    }
    spread.update({f"<unused{i}>": i for i in free})
    return spread


def _tokenizer(model: models.BPE, split: str, layout: TokenizerLayout) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, use_regex=False, trim_offsets=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    for content, special in layout.added:  # one by one: ids follow the order
        token = AddedToken(content, special=special, normalized=False)
        if special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    return tokenizer


def _write_tokenizer_config(
    folder: Path, added: dict[str, int], tokenizer_class: str, layout: TokenizerLayout
) -> None:
    special = [content for content, is_special in layout.added if is_special]
    decoder = {
        str(added[content]): {
            "content": content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": is_special,
        }
        for content, is_special in layout.added
    }
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "additional_special_tokens": special[1:],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "extra_special_tokens": dict(layout.named),
        **layout.named,
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "processor_class": layout.processor_class,
        "split_special_tokens": False,
        "tokenizer_class": tokenizer_class,
        "unk_token": None,
    }
    dump(folder / "tokenizer_config.json", config, ensure_ascii=False)
    special_map = {"additional_special_tokens": special[1:], **layout.named}
    dump(
        folder / "special_tokens_map.json",
        special_map | {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ensure_ascii=False,
    )
