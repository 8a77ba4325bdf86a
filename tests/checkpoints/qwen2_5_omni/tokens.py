"""Special tokens, chat template and token ids of a Qwen2.5-Omni demo checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from tests.checkpoints.tokenizer import (
    GENUINE_VOCAB_SIZE,
    TokenizerLayout,
    Vocabulary,
    padded_vocab_size,
    spoken_ids,
    write_words_tokenizer,
)

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
_LAYOUT = TokenizerLayout(_ADDED, _NAMED, _CHAT_TEMPLATE, "Qwen2_5OmniProcessor")
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
    vocab = write_words_tokenizer(folder, vocabulary, _LAYOUT)
    if vocabulary == "full":
        return _token_ids(vocab, GENUINE_VOCAB_SIZE, _GENUINE_TTS_IDS, spoken_ids(vocab))
    return _packed_token_ids(vocab, spoken_ids(vocab))


def _packed_token_ids(vocab: dict[str, int], spoken: tuple[int, ...]) -> TokenIds:
    """The ids of the speech part follow the added tokens."""
    first = len(vocab) + len(_ADDED)
    tts = {name: first + i for i, name in enumerate(_GENUINE_TTS_IDS)}
    return _token_ids(vocab, padded_vocab_size(first + len(tts)), tts, spoken)


def _token_ids(
    vocab: dict[str, int], vocab_size: int, tts: dict[str, int], spoken: tuple[int, ...]
) -> TokenIds:
    added = _LAYOUT.added_ids(vocab)
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
