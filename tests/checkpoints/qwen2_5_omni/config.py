"""The JSON files of a demo checkpoint: config, generation defaults and preprocessors.

Key names and their nesting follow the published Qwen2.5-Omni-7B files.
"""

from dataclasses import dataclass
from pathlib import Path

from tests.checkpoints.json_files import Json, dump
from tests.checkpoints.qwen2_5_omni.sizes import DemoSize, TextSize
from tests.checkpoints.qwen2_5_omni.tokens import TokenIds

CODEC_VOCABULARY = 8448
CODES = 8193
"""Codec ids 0..8192 are sounds. The DiT's table has one more row and no others."""
CODEC_MASK, CODEC_PAD, CODEC_START, CODEC_END = 8296, 8292, 8293, 8294
# Text ids are those of "small" or "full"; codec ids are always the genuine ones.


@dataclass(frozen=True)
class Preprocessing:
    """Limits of the preprocessors, for which vLLM sizes its profiling run."""

    max_audio_s: int
    """Longer recordings are truncated to this."""
    max_pixels: int
    """Larger images are scaled down to this."""


DEMO_PREPROCESSING = Preprocessing(max_audio_s=300, max_pixels=50_176)
"""Audio has the published limit. Images are smaller: vLLM would profile with one of 16 thousand tokens."""

_AUDIO_RATE_HZ, _AUDIO_HOP = 16_000, 160


def write_configs(folder: Path, model: Json, ids: TokenIds, preprocessing: Preprocessing) -> None:
    """Write `model` as config.json, plus generation_config.json and preprocessor_config.json."""
    dump(folder / "config.json", model)
    generation: Json = {
        "bos_token_id": ids.end_of_text,
        "eos_token_id": [ids.im_end, ids.end_of_text],
        "pad_token_id": ids.end_of_text,
        "do_sample": False,
    }
    dump(folder / "generation_config.json", generation)
    preprocessor: Json = {
        "processor_class": "Qwen2_5OmniProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": _AUDIO_RATE_HZ,
        "hop_length": _AUDIO_HOP,
        "n_fft": 400,
        "chunk_length": preprocessing.max_audio_s,
        "n_samples": preprocessing.max_audio_s * _AUDIO_RATE_HZ,
        "nb_max_frames": preprocessing.max_audio_s * _AUDIO_RATE_HZ // _AUDIO_HOP,
        "padding_side": "right",
        "padding_value": 0.0,
        "dither": 0.0,
        "return_attention_mask": True,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 3136,
        "max_pixels": preprocessing.max_pixels,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    dump(folder / "preprocessor_config.json", preprocessor)


def demo_model_config(size: DemoSize, ids: TokenIds, dtype: str) -> Json:
    """The content of config.json for a model of `size`."""
    return {
        "architectures": ["Qwen2_5OmniModel"],
        "model_type": "qwen2_5_omni",
        "enable_audio_output": True,
        "enable_talker": True,
        "torch_dtype": dtype,
        "thinker_config": _thinker(size, ids, dtype),
        "talker_config": _talker(size, ids, dtype),
        "token2wav_config": {
            "model_type": "qwen2_5_omni_token2wav",
            "dit_config": _dit(size),
            "bigvgan_config": _bigvgan(size),
        },
    }


def _media_ids(ids: TokenIds) -> Json:
    return {
        "audio_token_index": ids.audio,
        "image_token_index": ids.image,
        "video_token_index": ids.video,
        "audio_start_token_id": ids.audio_bos,
        "audio_end_token_id": ids.audio_eos,
        # transformers reads both, and its config classes have no default for them
        "vision_start_token_id": ids.vision_bos,
        "vision_end_token_id": ids.vision_eos,
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }


def _text(size: TextSize) -> Json:
    return {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "max_window_layers": size.layers,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "rope_theta": size.rope_theta,
        "rope_scaling": {
            "mrope_section": list(size.mrope_section),
            "rope_type": "default",
            "type": "default",
        },
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def _thinker(size: DemoSize, ids: TokenIds, dtype: str) -> Json:
    ends: Json = {"bos_token_id": ids.im_start, "eos_token_id": ids.im_end, "pad_token_id": ids.end_of_text}
    return {
        "architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"],
        "model_type": "qwen2_5_omni_thinker",
        "torch_dtype": dtype,
        **_media_ids(ids),
        **ends,  # transformers' thinker reads its stop token here: generation_config.json is not its own
        "ignore_index": -100,
        "user_token_id": ids.user,
        "initializer_range": 0.02,
        "audio_config": {
            "model_type": "qwen2_5_omni_audio_encoder",
            "num_mel_bins": 128,
            "d_model": size.audio.hidden,
            "encoder_layers": size.audio.layers,
            "encoder_attention_heads": size.audio.heads,
            "encoder_ffn_dim": size.audio.intermediate,
            "max_source_positions": 1500,
            "n_window": 100,
            "output_dim": size.thinker.hidden,
            "activation_function": "gelu",
            "scale_embedding": False,
        },
        "vision_config": {
            "model_type": "qwen2_5_omni_vision_encoder",
            "depth": size.vision.layers,
            "hidden_size": size.vision.hidden,
            "embed_dim": size.vision.hidden,
            "hidden_act": "silu",
            "intermediate_size": size.vision.intermediate,
            "num_heads": size.vision.heads,
            "in_channels": 3,
            "in_chans": 3,
            "out_hidden_size": size.thinker.hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "tokens_per_second": 25,  # what vLLM reads for M-RoPE; transformers reads position_id_per_seconds
            "window_size": 112,
            "fullatt_block_indexes": list(size.vision.full_attention_layers),
        },
        "text_config": {
            "model_type": "qwen2_5_omni_text",
            "vocab_size": ids.vocab_size,
            **_text(size.thinker),
            **ends,
        },
    }


def _talker(size: DemoSize, ids: TokenIds, dtype: str) -> Json:
    return {
        "architectures": ["Qwen2OmniTalkerForConditionalGeneration"],
        "model_type": "qwen2_5_omni_talker",
        "torch_dtype": dtype,
        **_media_ids(ids),
        "vocab_size": CODEC_VOCABULARY,
        "embedding_size": size.thinker.hidden,
        **_text(size.talker),
        "head_dim": size.talker.head_dim,
        "spatial_merge_size": 2,
        "tts_codec_start_token_id": CODEC_START,
        "tts_codec_end_token_id": CODEC_END,
        "tts_codec_pad_token_id": CODEC_PAD,
        "tts_codec_mask_token_id": CODEC_MASK,
        "tts_text_start_token_id": ids.tts_start,
        "tts_text_end_token_id": ids.tts_end,
        "tts_text_pad_token_id": ids.tts_pad,
    }


def _dit(size: DemoSize) -> Json:
    dit = size.dit
    return {
        "model_type": "qwen2_5_omni_dit",
        # The published file says dim, depth and heads; transformers 5 reads the longer names.
        "dim": dit.hidden,
        "depth": dit.layers,
        "heads": dit.heads,
        "hidden_size": dit.hidden,
        "num_hidden_layers": dit.layers,
        "num_attention_heads": dit.heads,
        "head_dim": dit.head_dim,
        "ff_mult": 2,
        "emb_dim": dit.code_embedding,
        "block_size": 24,
        "look_ahead_layers": list(dit.look_ahead_layers),
        "look_backward_layers": list(dit.look_backward_layers),
        "repeats": 2,
        "num_embeds": CODES,
        "mel_dim": 80,
        "dropout": 0.1,
        "enc_emb_dim": 192,
        "enc_dim": dit.speaker_encoder,
        # ECAPA concatenates the outputs of the inner layers: the last channel count is their sum.
        "enc_channels": [dit.speaker_encoder] * 4 + [3 * dit.speaker_encoder],
        "enc_kernel_sizes": [5, 3, 3, 3, 1],
        "enc_dilations": [1, 2, 3, 4, 1],
        "enc_attention_channels": 8,
        "enc_res2net_scale": 2,
        "enc_se_channels": 8,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
    }


def _bigvgan(size: DemoSize) -> Json:
    return {
        "model_type": "qwen2_5_omni_bigvgan",
        "mel_dim": 80,
        "upsample_initial_channel": size.vocoder.channels,
        "upsample_rates": [5, 3, 2, 2, 2, 2],
        "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
        "resblock_kernel_sizes": list(size.vocoder.resblock_kernels),
        "resblock_dilation_sizes": [[1, 3, 5]] * len(size.vocoder.resblock_kernels),
    }
