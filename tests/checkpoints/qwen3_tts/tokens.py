"""Tokens of a Qwen3-TTS demo checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from tests.checkpoints.qwen3_omni.tokens import ADDED
from tests.checkpoints.tokenizer import (
    SPACE,
    TokenizerLayout,
    Vocabulary,
    padded_vocab_size,
    spoken_ids,
    write_words_tokenizer,
)

GENUINE_VOCAB_SIZE = 151936

CAMEL_CASE = "iPhone"
"""With a space before it one token, unless the pre-tokenizer parts it at the capital letter, as that of
transformers' `fix_mistral_regex` does."""

# The genuine tokenizer has the added tokens of Qwen3-Omni's.
_LAYOUT = TokenizerLayout(
    added=ADDED,
    named={},
    chat_template=None,
    processor_class="Qwen3TTSProcessor",
    more_words=(SPACE + CAMEL_CASE,),
)


@dataclass(frozen=True)
class TokenIds:
    """Text ids in the model's config, and those of words."""

    vocab_size: int
    """Rows of the text embedding: all tokens, then padding."""
    im_start: int
    im_end: int
    assistant: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    spoken: tuple[int, ...]


def write_tokenizer(folder: Path, vocabulary: Vocabulary) -> TokenIds:
    """Write the tokenizer's files. Vocabularies: see `write_words_tokenizer`."""
    vocab = write_words_tokenizer(folder, vocabulary, _LAYOUT)
    added = _LAYOUT.added_ids(vocab)
    return TokenIds(
        vocab_size=(
            GENUINE_VOCAB_SIZE if vocabulary == "full" else padded_vocab_size(len(vocab) + len(added))
        ),
        im_start=added["<|im_start|>"],
        im_end=added["<|im_end|>"],
        assistant=vocab["assistant"],
        tts_pad=added["<tts_pad>"],
        tts_bos=added["<tts_text_bos>"],
        tts_eos=added["<tts_text_eod>"],
        spoken=spoken_ids(vocab),
    )
