"""The tokenizer of the language model that reads text: unlike that of all other demo checkpoints, one with
SentencePiece's marks, as Llama's."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from tests.checkpoints.tokenizer import padded_vocab_size
from tests.checkpoints.words import PROMPTED, PUNCTUATION, SPOKEN

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class TextIds:
    vocab_size: int
    end: int
    spoken: tuple[int, ...]
    """Those that the model may generate, besides the end."""
    opening: tuple[int, ...]
    """The last ones before an answer."""


def write_sentencepiece_tokenizer(folder: Path) -> TextIds:
    """Every listed word is one token with the mark of its space; other text falls back to bytes."""
    words = [f"▁{word}" for word in (*SPOKEN, *PROMPTED)]
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    letters = sorted({letter for word in words for letter in word} | set("<|>\n"))
    alphabet = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PUNCTUATION, *letters]
    vocab = {piece: number for number, piece in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=_CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return TextIds(
        vocab_size=padded_vocab_size(len(vocab)),
        end=vocab["</s>"],
        spoken=tuple(vocab[piece] for piece in (*words[: len(SPOKEN)], *PUNCTUATION)),
        opening=tuple(tokenizer.encode("<|assistant|>\n", add_special_tokens=False).ids),
    )
