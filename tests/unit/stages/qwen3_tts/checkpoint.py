"""The files of a Qwen3-TTS checkpoint that the server process reads, written by hand."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)
NUM_PLAIN_TOKENS = 330
FIRST_SPECIAL_ID = NUM_PLAIN_TOKENS

CORPUS = [
    *["assistant", "user", "\n\n", " \n", "\n \n", "\n\n\n", "\u0301x"] * 20,
    *[
        "<|im_start|>user",
        "<|im_end|>",
        "|im",
        "<tool_call>",
        "!?",
        "''",
        "iPhone 12, quick's fox don't",
        "e\u0301x \u0301x",
    ]
    * 9,
    *[
        "The quick brown fox jumps over the lazy dog.",
        "iPhone 12, quick's, don't",
        "你好，世界",
        "हिन्दी",
        "👍🏽",
    ]
    * 9,
]
"""Its tokens cross the borders of what special tokens are spelled with, and of marks and letters."""

# Of Qwen2's tokenizer.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)

SIZES_1B7: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
PREDICTOR: dict[str, Any] = {
    **SIZES_1B7,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 5,
    "vocab_size": 2048,
    "num_code_groups": 16,
}
TALKER: dict[str, Any] = {
    **SIZES_1B7,
    "vocab_size": 3072,
    "text_vocab_size": 151936,
    "text_hidden_size": 2048,
    "num_code_groups": 16,
    "code_predictor_config": PREDICTOR,
    "codec_pad_id": 2148,
    "codec_bos_id": 2149,
    "codec_eos_token_id": 2150,
    "codec_think_id": 2154,
    "codec_nothink_id": 2155,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
    "codec_language_id": {"english": 2050, "chinese": 2055, "sichuan_dialect": 2062},
    "spk_id": {"serena": 3066, "eric": [2875]},
    "spk_is_dialect": {"serena": False, "eric": "sichuan_dialect"},
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3TTSForConditionalGeneration"],
    "model_type": "qwen3_tts",
    "tts_model_type": "custom_voice",
    "tts_model_size": "1b7",
    "tts_pad_token_id": FIRST_SPECIAL_ID + 4,
    "tts_bos_token_id": FIRST_SPECIAL_ID + 5,
    "tts_eos_token_id": FIRST_SPECIAL_ID + 6,
    "talker_config": TALKER,
}
DECODER: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "codebook_size": 2048,
    "codebook_dim": 512,
    "latent_dim": 1024,
    "decoder_dim": 1536,
    "num_quantizers": 16,
    "sliding_window": 72,
    "upsampling_ratios": [2, 2],
    "upsample_rates": [8, 5, 4, 3],
}


def write_checkpoint(folder: Path, *, talker: dict[str, Any] | None = None, **changes: Any) -> Path:
    """With the genuine sizes, and values changed in config.json and its `talker_config`; None removes one."""
    config = {**CONFIG, "talker_config": {**TALKER, **(talker or {})}, **changes}
    config["talker_config"] = {k: v for k, v in config["talker_config"].items() if v is not None}
    (folder / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "speech_tokenizer" / "config.json").write_text(json.dumps({"decoder_config": DECODER}))
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    """As in the published checkpoints, which have no tokenizer.json."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_PLAIN_TOKENS, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    assert trained.get_vocab_size() == NUM_PLAIN_TOKENS
    trained.model.save(str(folder))
    added = {
        str(FIRST_SPECIAL_ID + i): {"content": content, "special": content != "<tool_call>"}
        | dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
        for i, content in enumerate(SPECIAL)
    }
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
