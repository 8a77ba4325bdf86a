"""The speaking demo's tokenizer: whole words and numbers, everything else byte by byte."""

from functools import cache

from tokenizers import Regex, pre_tokenizers

from scripts.speaking_demo import vocabulary


@cache
def _splitter() -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex(vocabulary.SPLIT), behavior="isolated", invert=False)


def pieces(text: str) -> list[str]:
    """The pieces to look up in `vocab`."""
    return [piece for piece, _ in _splitter().pre_tokenize_str(text)]


@cache
def _characters() -> tuple[str, ...]:
    """The character for each of the 256 bytes in a byte-level vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = iter(range(256, 512))
    return tuple(chr(value if value in printable else next(others)) for value in range(256))


def plain_vocabulary() -> dict[str, int]:
    """Ids of the tokens in the byte-level alphabet: the 256 bytes by their value, then those of
    `vocabulary.tokens`."""
    vocab = {character: value for value, character in enumerate(_characters())}
    for text in vocabulary.tokens():
        vocab["".join(_characters()[value] for value in text.encode())] = len(vocab)
    return vocab
