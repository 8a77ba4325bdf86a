"""Components of Diffusers pipelines with random weights, most of them tiny: tokenizers, text encoders,
decoders."""

import json
import tempfile
from pathlib import Path
from typing import TypeVar

from diffusers import AutoencoderKL, AutoencoderKLQwenImage
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

HIDDEN = 32

TokenizerT = TypeVar("TokenizerT", Qwen2Tokenizer, CLIPTokenizer)

_QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Every byte is a token: there are no merges."""
    vocabulary = {piece: index for index, piece in enumerate(sorted(ByteLevel.alphabet()))}
    made = _from_files(
        Qwen2Tokenizer,
        vocabulary,
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
        },
    )
    made.add_special_tokens({"additional_special_tokens": list(_QWEN_SPECIAL[1:])})
    return made


def qwen_processor(tokenizer: Qwen2Tokenizer) -> Qwen2VLProcessor:
    """Sees images of a few pixels, whatever their size."""
    limits = {"min_pixels": 56 * 56, "max_pixels": 84 * 84}
    return Qwen2VLProcessor(
        Qwen2VLImageProcessor(**limits), tokenizer, Qwen2VLVideoProcessor(**limits), chat_template=None
    )


def qwen_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": len(tokenizer) + 8,
        "max_position_embeddings": 2048,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [0],
    }
    return _qwen_text_encoder(tokenizer, text, vision)


def genuine_qwen_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """The sizes of Qwen2.5-VL-7B."""
    text = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]},
    }
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    return _qwen_text_encoder(tokenizer, text, vision)


def _qwen_text_encoder(
    tokenizer: Qwen2Tokenizer, text: dict[str, object], vision: dict[str, object]
) -> Qwen2_5_VLForConditionalGeneration:
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in _QWEN_SPECIAL}
    special = {
        "tie_word_embeddings": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=text | special,
            vision_config=vision,
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )
    )


def qwen_vae(base_dim: int = 8) -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(base_dim=base_dim, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1)


def clip_tokenizer() -> CLIPTokenizer:
    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return _from_files(
        CLIPTokenizer,
        {piece: index for index, piece in enumerate(pieces)},
        {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77},
        model_max_length=77,
    )


def clip_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(_clip_config(tokenizer))


def projecting_clip_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(_clip_config(tokenizer))


def _clip_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    end = len(tokenizer) - 1
    return CLIPTextConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=len(tokenizer),
        projection_dim=HIDDEN,
        bos_token_id=end - 1,
        eos_token_id=end,
        pad_token_id=end,
    )


def t5_tokenizer() -> T5Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    letters = [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5Tokenizer(vocab=pieces + letters, extra_ids=0, model_max_length=77)


def t5_text_encoder(width: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=64,
            d_model=width,
            d_kv=8,
            d_ff=37,
            num_layers=2,
            num_heads=2,
            feed_forward_proj="gated-gelu",
        )
    )


def vae(latent_channels: int, **config: object) -> AutoencoderKL:
    """Eight pixels to a latent, as in the genuine models."""
    return AutoencoderKL(
        block_out_channels=[4, 4, 8, 8],
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        latent_channels=latent_channels,
        norm_num_groups=2,
        **config,
    )


def _from_files(
    cls: type[TokenizerT], vocabulary: dict[str, int], config: dict[str, object], **arguments: object
) -> TokenizerT:
    """A byte-level tokenizer without merges."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
        (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return cls.from_pretrained(folder, **arguments)
