"""Special tokens, chat template and token ids of a Qwen3-Omni demo checkpoint."""

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
ADDED = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
    ("<|audio_start|>", True),
    ("<|audio_end|>", True),
    ("<tts_pad>", True),
    ("<tts_text_bos>", True),
    ("<tts_text_eod>", True),
    ("<tts_text_bos_single>", True),
    ("<|audio_pad|>", True),
)
# Attributes of the tokenizer that Qwen3OmniMoeProcessor reads.
_NAMED = {
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
    "audio_token": "<|audio_pad|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
# Renders like the genuine chat template, without its part for tools. There is no system turn by default, and
# each part of a system message becomes a turn of its own.
_CHAT_TEMPLATE = (
    "{% macro rendered(content) %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'audio' or 'audio' in content or 'audio_url' in content %}"
    "<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endmacro %}"
    "{% for message in messages %}"
    "{% if message['content'] is string %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% elif loop.first and message['role'] == 'system' %}{% for content in message['content'] %}"
    "<|im_start|>system\n{{ rendered(content) }}<|im_end|>\n{% endfor %}"
    "{% else %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] %}{{ rendered(content) }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LAYOUT = TokenizerLayout(ADDED, _NAMED, _CHAT_TEMPLATE, "Qwen3OmniMoeProcessor")


@dataclass(frozen=True)
class TokenIds:
    """Text ids in the model's config, and those that its text head may produce."""

    vocab_size: int
    """Rows of the embedding: all tokens, then padding."""
    end_of_text: int
    im_start: int
    im_end: int
    audio: int
    audio_start: int
    audio_end: int
    image: int
    video: int
    vision_start: int
    vision_end: int
    system: int
    user: int
    assistant: int
    newline: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    spoken: tuple[int, ...]


def write_tokenizer(folder: Path, vocabulary: Vocabulary) -> TokenIds:
    """Write the tokenizer's files and the chat template.

    "small" packs all ids without gaps; "full" puts added tokens and roles where the genuine tokenizer has
    them and fills the rest with unreachable entries.
    """
    vocab = write_words_tokenizer(folder, vocabulary, _LAYOUT)
    added = _LAYOUT.added_ids(vocab)
    return TokenIds(
        vocab_size=(
            GENUINE_VOCAB_SIZE if vocabulary == "full" else padded_vocab_size(len(vocab) + len(added))
        ),
        end_of_text=added["<|endoftext|>"],
        im_start=added["<|im_start|>"],
        im_end=added["<|im_end|>"],
        audio=added["<|audio_pad|>"],
        audio_start=added["<|audio_start|>"],
        audio_end=added["<|audio_end|>"],
        image=added["<|image_pad|>"],
        video=added["<|video_pad|>"],
        vision_start=added["<|vision_start|>"],
        vision_end=added["<|vision_end|>"],
        system=vocab["system"],
        user=vocab["user"],
        assistant=vocab["assistant"],
        newline=vocab["Ċ"],
        tts_pad=added["<tts_pad>"],
        tts_bos=added["<tts_text_bos>"],
        tts_eos=added["<tts_text_eod>"],
        spoken=spoken_ids(vocab),
    )
