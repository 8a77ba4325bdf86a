"""Tokenizer of the demo checkpoint: Qwen2's byte-level BPE with a vocabulary of whole words.

Merges are built rather than trained: each word is assembled from its first letter on, and words with a
leading space precede those without. So every listed word is exactly one token, any other text falls back to
bytes, and the result does not depend on a trainer's version.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from scripts.demo_checkpoint.words import BARE, PROMPTED, PUNCTUATION, SPOKEN

Vocabulary = Literal["small", "full"]

# transformers/models/qwen2/tokenization_qwen2.py, PRETOKENIZE_REGEX
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_SPACE = "Ġ"  # the byte-level alphabet's sign for a space

# In the order of the genuine ids 151643, 151644, ...; True: special, left out of decoded text.
_ADDED = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|AUDIO|>", True),
    ("<|audio_bos|>", True),
    ("<|audio_eos|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_bos|>", True),
    ("<|vision_eos|>", True),
    ("<|vision_pad|>", True),
    ("<|IMAGE|>", True),
    ("<|VIDEO|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
)
# Attributes of the tokenizer that Qwen2_5OmniProcessor reads.
_NAMED = {
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
    "audio_token": "<|AUDIO|>",
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
}
# Renders like the genuine chat template, without its option to number images and videos.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif content['type'] == 'audio' or 'audio' in content or 'audio_url' in content %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif content['type'] == 'video' or 'video' in content %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GENUINE_WORD_IDS = {"user": 872, "system": 8948, "assistant": 77091}
_GENUINE_PLAIN_TOKENS = 151643
_GENUINE_VOCAB_SIZE = 152064
_GENUINE_TTS_IDS = {"pad": 151859, "start": 151860, "end": 151861, "Ethan": 151870, "Chelsie": 151872}


@dataclass(frozen=True)
class TokenIds:
    """Text ids in the model's config, and those that its text head may produce."""

    vocab_size: int
    """Rows of the embedding: all tokens, then the speech part's ids, then padding."""
    end_of_text: int
    im_start: int
    im_end: int
    audio: int
    audio_bos: int
    audio_eos: int
    image: int
    video: int
    vision_bos: int
    vision_eos: int
    user: int
    assistant: int
    newline: int
    tts_pad: int
    tts_start: int
    tts_end: int
    speakers: dict[str, int]
    """Voice name -> its beginning-of-speech token."""
    spoken: tuple[int, ...]


def write_tokenizer(folder: Path, vocabulary: Vocabulary) -> TokenIds:
    """Write the tokenizer's files and the chat template.

    "small" packs all ids without gaps; "full" puts special tokens, roles and the ids of the speech part where
    the genuine tokenizer has them (transformers' Qwen2.5-Omni configuration; 151870 and 151872 are the
    genuine voices' tokens) and fills the rest with unreachable entries.
    """
    vocab, merges = _plain_vocabulary()
    if vocabulary == "full":
        vocab = _spread_to_genuine_ids(vocab)
    _save(folder, models.BPE(vocab=vocab, merges=merges), vocab, _SPLIT, "Qwen2Tokenizer")
    _dump(folder / "vocab.json", vocab, indent=None)
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8"
    )
    _dump(folder / "added_tokens.json", _added_ids(vocab))
    spoken = tuple(sorted([vocab[_SPACE + word] for word in SPOKEN] + [vocab[mark] for mark in PUNCTUATION]))
    if vocabulary == "full":
        return _token_ids(vocab, _GENUINE_VOCAB_SIZE, _GENUINE_TTS_IDS, spoken)
    return _packed_token_ids(vocab, spoken)


def write_word_tokenizer(folder: Path, vocab: dict[str, int], split: str) -> TokenIds:
    """Like `write_tokenizer`, for whole words and the 256 bytes: each match of the regular expression `split`
    is one token if it is in `vocab`, and bytes otherwise; nothing is merged. All plain tokens count as
    spoken.

    transformers' class for Qwen2 would drop `ignore_merges` and `split`, so this names the general one.
    """
    model = models.BPE(vocab=vocab, merges=[], ignore_merges=True)
    _save(folder, model, vocab, split, "PreTrainedTokenizerFast")
    return _packed_token_ids(vocab, tuple(vocab.values()))


def _save(folder: Path, model: models.BPE, vocab: dict[str, int], split: str, tokenizer_class: str) -> None:
    _tokenizer(model, split).save(str(folder / "tokenizer.json"), pretty=False)
    _write_tokenizer_config(folder, _added_ids(vocab), tokenizer_class)
    _dump(folder / "chat_template.json", {"chat_template": _CHAT_TEMPLATE})


def _added_ids(vocab: dict[str, int]) -> dict[str, int]:
    return {content: len(vocab) + i for i, (content, _) in enumerate(_ADDED)}


def _packed_token_ids(vocab: dict[str, int], spoken: tuple[int, ...]) -> TokenIds:
    """The ids of the speech part follow the added tokens."""
    first = len(vocab) + len(_ADDED)
    tts = {name: first + i for i, name in enumerate(_GENUINE_TTS_IDS)}
    return _token_ids(vocab, -(-(first + len(tts)) // 64) * 64, tts, spoken)


def _token_ids(
    vocab: dict[str, int], vocab_size: int, tts: dict[str, int], spoken: tuple[int, ...]
) -> TokenIds:
    added = _added_ids(vocab)
    return TokenIds(
        vocab_size=vocab_size,
        end_of_text=added["<|endoftext|>"],
        im_start=added["<|im_start|>"],
        im_end=added["<|im_end|>"],
        audio=added["<|AUDIO|>"],
        audio_bos=added["<|audio_bos|>"],
        audio_eos=added["<|audio_eos|>"],
        image=added["<|IMAGE|>"],
        video=added["<|VIDEO|>"],
        vision_bos=added["<|vision_bos|>"],
        vision_eos=added["<|vision_eos|>"],
        user=vocab["user"],
        assistant=vocab["assistant"],
        newline=vocab["Ċ"],
        tts_pad=tts["pad"],
        tts_start=tts["start"],
        tts_end=tts["end"],
        speakers={name: tts[name] for name in ("Chelsie", "Ethan")},
        spoken=spoken,
    )


def _byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte, in the order of its ids 0..255 (so that a newline is
    198)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    moved = 256 - len(kept)
    return [chr(b) for b in kept] + [chr(256 + i) for i in range(moved)]


def _plain_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    vocab = {character: i for i, character in enumerate(_byte_alphabet())}
    merges: list[tuple[str, str]] = []
    for word in [*(_SPACE + w for w in (*SPOKEN, *PROMPTED)), *BARE]:
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


def _tokenizer(model: models.BPE, split: str) -> Tokenizer:
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
    for content, special in _ADDED:  # one by one: ids follow the order
        token = AddedToken(content, special=special, normalized=False)
        if special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    return tokenizer


def _write_tokenizer_config(folder: Path, added: dict[str, int], tokenizer_class: str) -> None:
    special = [content for content, is_special in _ADDED if is_special]
    decoder = {
        str(added[content]): {
            "content": content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": is_special,
        }
        for content, is_special in _ADDED
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
        "extra_special_tokens": _NAMED,
        **_NAMED,
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "processor_class": "Qwen2_5OmniProcessor",
        "split_special_tokens": False,
        "tokenizer_class": tokenizer_class,
        "unk_token": None,
    }
    _dump(folder / "tokenizer_config.json", config)
    special_map = {"additional_special_tokens": special[1:], **_NAMED}
    _dump(
        folder / "special_tokens_map.json",
        special_map | {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )


def _dump(path: Path, content: object, indent: int | None = 2) -> None:
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
