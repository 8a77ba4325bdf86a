"""The JSON files of a demo checkpoint: config, generation defaults and preprocessors.

Key names and their nesting follow the published Qwen3-Omni-30B-A3B-Instruct files.
"""

from dataclasses import dataclass
from pathlib import Path

from tests.checkpoints.codec_weights import CODEBOOKS, CODES
from tests.checkpoints.json_files import Json, dump
from tests.checkpoints.qwen3_omni.sizes import DemoSize, MoeTextSize
from tests.checkpoints.qwen3_omni.tokens import TokenIds

# Text ids are those of "small" or "full"; codec ids are always the genuine ones.
CODEC_VOCABULARY = 3072
"""Of the first codebook. Ids from 2048 on are special; only the end can be sampled."""
CODEC_PAD, CODEC_BOS, CODEC_END = 2148, 2149, 2150
CODEC_NOTHINK, CODEC_THINK_BOS, CODEC_THINK_END = 2155, 2156, 2157
SPEAKERS = {"chelsie": 2301, "ethan": 2302, "aiden": 2303}


@dataclass(frozen=True)
class Preprocessing:
    """Limits of the preprocessors, for which vLLM sizes its profiling run."""

    max_pixels: int
    """Larger images are scaled down to this."""


DEMO_PREPROCESSING = Preprocessing(max_pixels=50_176)
"""vLLM would profile with an image of 12 thousand tokens otherwise."""

_AUDIO_RATE_HZ, _AUDIO_HOP = 16_000, 160
_MAX_AUDIO_S = 300


def write_configs(folder: Path, model: Json, preprocessing: Preprocessing) -> None:
    """Write `model` as config.json, plus generation_config.json and preprocessor_config.json."""
    dump(folder / "config.json", model)
    generation: Json = {
        "talker_max_new_tokens": 4096,
        "talker_repetition_penalty": 1.05,
        "talker_temperature": 0.9,
        "talker_top_k": 50,
        "talker_top_p": 1.0,
    }
    dump(folder / "generation_config.json", generation)
    # The published file has no chunk_length; audio is not truncated.
    preprocessor: Json = {
        "processor_class": "Qwen3OmniMoeProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": _AUDIO_RATE_HZ,
        "hop_length": _AUDIO_HOP,
        "n_fft": 400,
        "n_samples": _MAX_AUDIO_S * _AUDIO_RATE_HZ,
        "nb_max_frames": _MAX_AUDIO_S * _AUDIO_RATE_HZ // _AUDIO_HOP,
        "padding_side": "right",
        "padding_value": 0.0,
        "dither": 0.0,
        "return_attention_mask": True,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 3136,
        "max_pixels": preprocessing.max_pixels,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    dump(folder / "preprocessor_config.json", preprocessor)


def demo_model_config(size: DemoSize, ids: TokenIds, dtype: str) -> Json:
    """The content of config.json for a model of `size`."""
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": dtype,
        "enable_audio_output": True,
        "im_start_token_id": ids.im_start,
        "im_end_token_id": ids.im_end,
        "system_token_id": ids.system,
        "user_token_id": ids.user,
        "assistant_token_id": ids.assistant,
        "tts_pad_token_id": ids.tts_pad,
        "tts_bos_token_id": ids.tts_bos,
        "tts_eos_token_id": ids.tts_eos,
        "thinker_config": _thinker(size, ids, dtype),
        "talker_config": _talker(size, ids),
        "code2wav_config": _code2wav(size),
    }


def _media_ids(ids: TokenIds) -> Json:
    return {
        "audio_token_id": ids.audio,
        "image_token_id": ids.image,
        "video_token_id": ids.video,
        "audio_start_token_id": ids.audio_start,
        "audio_end_token_id": ids.audio_end,
        "vision_start_token_id": ids.vision_start,
        "vision_end_token_id": ids.vision_end,
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }


def _text(size: MoeTextSize, *, has_mrope_interleaved: bool) -> Json:
    scaling: Json = {
        "interleaved": True,
        "mrope_section": list(size.mrope_section),
        "rope_type": "default",
        "type": "default",
    }
    if has_mrope_interleaved:
        scaling["mrope_interleaved"] = True
    return {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 65536,
        "rope_theta": size.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "num_experts": size.experts.experts,
        "num_experts_per_tok": size.experts.active,
        "moe_intermediate_size": size.experts.intermediate,
        "shared_expert_intermediate_size": size.experts.shared,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def _thinker(size: DemoSize, ids: TokenIds, dtype: str) -> Json:
    return {
        "model_type": "qwen3_omni_moe_thinker",
        "dtype": dtype,
        **_media_ids(ids),
        "user_token_id": ids.user,
        "initializer_range": 0.02,
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            "num_mel_bins": 128,
            "d_model": size.audio.hidden,
            "encoder_layers": size.audio.layers,
            "num_hidden_layers": size.audio.layers,
            "encoder_attention_heads": size.audio.heads,
            "encoder_ffn_dim": size.audio.intermediate,
            "max_source_positions": 1500,
            "n_window": 50,
            "n_window_infer": 800,
            "conv_chunksize": 500,
            "downsample_hidden_size": size.audio.conv_channels,
            "output_dim": size.thinker.hidden,
            "activation_function": "gelu",
            "scale_embedding": False,
        },
        "vision_config": {
            "model_type": "qwen3_omni_moe_vision_encoder",
            "depth": size.vision.layers,
            "hidden_size": size.vision.hidden,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": size.vision.intermediate,
            "num_heads": size.vision.heads,
            "in_channels": 3,
            "in_chans": 3,
            "image_size": 768,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "spatial_patch_size": 16,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "out_hidden_size": size.thinker.hidden,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": list(size.vision.deepstack_layers),
            "apply_vit_abs_pos_embed": True,
        },
        "text_config": {
            "model_type": "qwen3_omni_moe_text",
            "vocab_size": ids.vocab_size,
            **_text(size.thinker, has_mrope_interleaved=True),
            "intermediate_size": size.thinker.experts.intermediate,
            "use_qk_norm": True,
        },
    }


def _talker(size: DemoSize, ids: TokenIds) -> Json:
    return {
        "model_type": "qwen3_omni_moe_talker",
        **_media_ids(ids),
        "accept_hidden_layer": size.accept_hidden_layer,
        "thinker_hidden_size": size.thinker.hidden,
        "num_code_groups": CODEBOOKS,
        "spatial_merge_size": 2,
        "output_router_logits": False,
        "codec_pad_id": CODEC_PAD,
        "codec_bos_id": CODEC_BOS,
        "codec_eos_token_id": CODEC_END,
        "codec_nothink_id": CODEC_NOTHINK,
        "codec_think_bos_id": CODEC_THINK_BOS,
        "codec_think_eos_id": CODEC_THINK_END,
        "speaker_id": dict(SPEAKERS),
        "text_config": {
            "model_type": "qwen3_omni_moe_talker_text",
            "vocab_size": CODEC_VOCABULARY,
            # The published file lacks the key here, although the talker interleaves as well.
            **_text(size.talker, has_mrope_interleaved=False),
            "intermediate_size": 2 * size.talker.hidden,
        },
        "code_predictor_config": {
            "model_type": "qwen3_omni_moe_talker_code_predictor",
            "vocab_size": CODES,
            "num_code_groups": CODEBOOKS,
            "hidden_size": size.talker.hidden,
            "intermediate_size": size.predictor.intermediate,
            "num_hidden_layers": size.predictor.layers,
            "num_attention_heads": size.predictor.heads,
            "num_key_value_heads": size.predictor.kv_heads,
            "head_dim": size.predictor.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "rope_theta": 1000000,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": ["full_attention"] * size.predictor.layers,
            "use_sliding_window": False,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_cache": True,
        },
    }


def _code2wav(size: DemoSize) -> Json:
    code2wav = size.code2wav
    return {
        "model_type": "",  # as published
        "codebook_size": CODES,
        "codebook_dim": code2wav.hidden // 2,
        "semantic_codebook_size": 4096,
        "num_semantic_quantizers": 1,
        "num_quantizers": CODEBOOKS,
        "vector_quantization_hidden_dimension": code2wav.hidden // 2,
        "hidden_size": code2wav.hidden,
        "intermediate_size": code2wav.intermediate,
        "num_hidden_layers": code2wav.layers,
        "num_attention_heads": code2wav.heads,
        "num_key_value_heads": code2wav.heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "layer_scale_initial_scale": 0.01,
        "sliding_window": code2wav.sliding_window,
        "max_position_embeddings": 8000,
        "rope_theta": 10000,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_dim": code2wav.decoder_channels,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }
