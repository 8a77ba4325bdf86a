"""The JSON files of a Qwen3-TTS demo checkpoint.

Key names and their nesting follow the published files.
"""

from pathlib import Path
from typing import Literal

from tests.checkpoints.codec_weights import CODEBOOKS, CODES
from tests.checkpoints.json_files import Json, dump
from tests.checkpoints.qwen3_tts.sizes import DemoSize, TextSize
from tests.checkpoints.qwen3_tts.tokens import TokenIds

Kind = Literal["custom_voice", "voice_design", "base"]
KINDS: tuple[Kind, ...] = ("custom_voice", "voice_design", "base")

# Text ids are those of "small" or "full"; codec ids are always the genuine ones.
CODEC_VOCABULARY = 3072
"""Of the first codebook. Only the last 1024 ids are no sounds, and of these only the end can be sampled."""
CODEC_PAD, CODEC_BOS, CODEC_END = 2148, 2149, 2150
CODEC_THINK, CODEC_NOTHINK, CODEC_THINK_BOS, CODEC_THINK_END = 2154, 2155, 2156, 2157
LANGUAGES = {
    "chinese": 2055,
    "english": 2050,
    "german": 2053,
    "italian": 2070,
    "portuguese": 2071,
    "spanish": 2054,
    "japanese": 2058,
    "korean": 2064,
    "french": 2061,
    "russian": 2069,
    "beijing_dialect": 2074,
    "sichuan_dialect": 2062,
}
SPEAKERS = {
    "serena": 3066,
    "vivian": 3065,
    "uncle_fu": 3010,
    "ryan": 3061,
    "aiden": 2861,
    "ono_anna": 2873,
    "sohee": 2864,
    "eric": 2875,
    "dylan": 2878,
}
_DIALECTS = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}

SAMPLE_RATE_HZ = 24_000
UPSAMPLE_RATES, UPSAMPLING_RATIOS = (8, 5, 4, 3), (2, 2)
_SAMPLES_PER_FRAME = 1920

SPEAKER_KERNELS, SPEAKER_DILATIONS = (5, 3, 3, 3, 1), (1, 2, 3, 4, 1)
MEL_BANDS = 128


def write_configs(folder: Path, size: DemoSize, kind: Kind, ids: TokenIds) -> None:
    """Write all of them, but not those of the tokenizer."""
    dump(folder / "config.json", model_config(size, kind, ids))
    generation: Json = {
        "do_sample": True,
        "repetition_penalty": 1.05,
        "temperature": 0.9,
        "top_p": 1.0,
        "top_k": 50,
        "subtalker_dosample": True,
        "subtalker_temperature": 0.9,
        "subtalker_top_p": 1.0,
        "subtalker_top_k": 50,
        "max_new_tokens": 8192,
    }
    dump(folder / "generation_config.json", generation)
    codec = folder / "speech_tokenizer"
    codec.mkdir()
    dump(codec / "config.json", codec_config(size))
    features: Json = {
        "feature_extractor_type": "EncodecFeatureExtractor",
        "feature_size": 1,
        "sampling_rate": SAMPLE_RATE_HZ,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "chunk_length_s": None,
        "overlap": None,
    }
    dump(codec / "preprocessor_config.json", features)


def model_config(size: DemoSize, kind: Kind, ids: TokenIds) -> Json:
    speaker_encoder: Json = {
        "mel_dim": MEL_BANDS,
        "enc_dim": size.talker.hidden,
        "enc_channels": speaker_channels(size),
        "enc_kernel_sizes": list(SPEAKER_KERNELS),
        "enc_dilations": list(SPEAKER_DILATIONS),
        "enc_attention_channels": size.speaker.attention_channels,
        "enc_res2net_scale": size.speaker.res2net_scale,
        "enc_se_channels": size.speaker.se_channels,
        "sample_rate": SAMPLE_RATE_HZ,
    }
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": size.published,
        "tts_model_type": kind,
        "assistant_token_id": ids.assistant,
        "im_start_token_id": ids.im_start,
        "im_end_token_id": ids.im_end,
        "tts_pad_token_id": ids.tts_pad,
        "tts_bos_token_id": ids.tts_bos,
        "tts_eos_token_id": ids.tts_eos,
        **({"speaker_encoder_config": speaker_encoder} if kind == "base" else {}),
        "talker_config": _talker(size, kind, ids),
    }


def speaker_channels(size: DemoSize) -> list[int]:
    """Of the speaker encoder's blocks; the last one gets what the three before it give."""
    return [*[size.speaker.channels] * 4, 3 * size.speaker.channels]


def _text(size: TextSize, rope_theta: float) -> Json:
    return {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta,
        "attention_bias": False,
        "attention_dropout": 0,
        "initializer_range": 0.02,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
    }


def _talker(size: DemoSize, kind: Kind, ids: TokenIds) -> Json:
    speakers = SPEAKERS if kind == "custom_voice" else {}
    return {
        "model_type": "qwen3_tts_talker",
        "vocab_size": CODEC_VOCABULARY,
        **_text(size.talker, size.rope_theta),
        "max_position_embeddings": 32768,
        "rope_scaling": {
            "interleaved": True,
            "mrope_section": list(size.mrope_section),
            "rope_type": "default",
            "type": "default",
        },
        "position_id_per_seconds": 13,
        "text_vocab_size": ids.vocab_size,
        "text_hidden_size": size.text_hidden,
        "num_code_groups": CODEBOOKS,
        "codec_pad_id": CODEC_PAD,
        "codec_bos_id": CODEC_BOS,
        "codec_eos_token_id": CODEC_END,
        "codec_think_id": CODEC_THINK,
        "codec_nothink_id": CODEC_NOTHINK,
        "codec_think_bos_id": CODEC_THINK_BOS,
        "codec_think_eos_id": CODEC_THINK_END,
        "codec_language_id": dict(LANGUAGES),
        "spk_id": dict(speakers),
        "spk_is_dialect": {name: _DIALECTS.get(name, False) for name in speakers},
        "code_predictor_config": {
            "model_type": "qwen3_tts_talker_code_predictor",
            "vocab_size": CODES,
            **_text(size.predictor, size.rope_theta),
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "layer_types": ["full_attention"] * size.predictor.layers,
            "rope_scaling": None,
            "num_code_groups": CODEBOOKS,
        },
    }


def codec_config(size: DemoSize) -> Json:
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "input_sample_rate": SAMPLE_RATE_HZ,
        "output_sample_rate": SAMPLE_RATE_HZ,
        "decode_upsample_rate": _SAMPLES_PER_FRAME,
        "encode_downsample_rate": _SAMPLES_PER_FRAME,
        "encoder_valid_num_quantizers": CODEBOOKS,
        "decoder_config": decoder_config(size),
        "encoder_config": encoder_config(size),
    }


def decoder_config(size: DemoSize) -> Json:
    decoder = size.decoder
    return {
        "codebook_size": CODES,
        "codebook_dim": decoder.codebook_dim,
        "num_quantizers": CODEBOOKS,
        "num_semantic_quantizers": 1,
        "semantic_codebook_size": 4096,
        "latent_dim": decoder.latent,
        "vector_quantization_hidden_dimension": decoder.codebook_dim,
        "hidden_size": decoder.hidden,
        "intermediate_size": decoder.intermediate,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.heads,
        "head_dim": decoder.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "layer_scale_initial_scale": 0.01,
        "sliding_window": decoder.sliding_window,
        "max_position_embeddings": 8000,
        "rope_theta": 10000,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_dim": decoder.channels,
        "upsample_rates": list(UPSAMPLE_RATES),
        "upsampling_ratios": list(UPSAMPLING_RATIOS),
    }


def encoder_config(size: DemoSize) -> Json:
    encoder = size.audio_encoder
    return {
        "model_type": "mimi",
        "audio_channels": 1,
        "codebook_dim": encoder.codebook_dim,
        "codebook_size": CODES,
        "compress": 2,
        "dilation_growth_rate": 2,
        "frame_rate": 12.5,
        "head_dim": encoder.hidden // encoder.heads,
        "hidden_act": "gelu",
        "hidden_size": encoder.hidden,
        "intermediate_size": encoder.intermediate,
        "kernel_size": 7,
        "last_kernel_size": 3,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "norm_eps": 1e-5,
        "num_attention_heads": encoder.heads,
        "num_filters": encoder.filters,
        "num_hidden_layers": encoder.layers,
        "num_key_value_heads": encoder.heads,
        "num_quantizers": 2 * CODEBOOKS,
        "num_residual_layers": 1,
        "num_semantic_quantizers": 1,
        "pad_mode": "constant",
        "residual_kernel_size": 3,
        "rope_theta": 10000.0,
        "sampling_rate": SAMPLE_RATE_HZ,
        "sliding_window": 250,
        "trim_right_ratio": 1.0,
        "upsample_groups": encoder.hidden,
        "upsampling_ratios": [8, 6, 5, 4],
        "use_causal_conv": True,
        "use_conv_shortcut": False,
        "vector_quantization_hidden_dimension": encoder.codebook_dim,
    }
