"""The configs of Qwen3-TTS, which transformers does not know, and what vLLM sees of them in each stage's
engine (`hf_overrides`).

vLLM also calls these functions with a placeholder of another class, which they return unchanged.
"""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig, Qwen3Config
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
    Qwen3OmniMoeTalkerCodePredictorConfig,
)


class Qwen3TTSConfig(PreTrainedConfig):
    model_type = "qwen3_tts"
    talker_config: dict[str, Any] | None = None
    speaker_encoder_config: dict[str, Any] | None = None


class Qwen3TTSTokenizerConfig(PreTrainedConfig):
    """Of the folder `speech_tokenizer`."""

    model_type = "qwen3_tts_tokenizer_12hz"
    decoder_config: dict[str, Any] | None = None
    encoder_config: dict[str, Any] | None = None


class Qwen3TTSTalkerConfig(Qwen3Config):
    text_vocab_size: int = 151936
    text_hidden_size: int = 2048
    codec_eos_token_id: int = 2150
    code_predictor_config: dict[str, Any] | None = None


class Qwen3TTSDecoderConfig(Qwen3OmniMoeCode2WavConfig):
    latent_dim: int = 1024
    codebook_dim: int = 512
    head_dim: int = 64


class Qwen3TTSVoiceEncoderConfig(PreTrainedConfig):
    """The published files have few of these fields."""

    mel_dim: int = 128
    enc_dim: int = 1024
    enc_channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128
    # vLLM requires them of any model. Lengths are in frames.
    vocab_size: int = 1
    max_position_embeddings: int = 4000


def register_configs() -> None:
    for config in (Qwen3TTSConfig, Qwen3TTSTokenizerConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)


def talker_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the talker's decoder, with the fields of other parts that the model needs."""
    if not isinstance(config, Qwen3TTSConfig):
        return config
    assert config.talker_config is not None
    # The axes of its M-RoPE are equal at all positions, which is plain RoPE.
    return Qwen3TTSTalkerConfig(
        **_without(config.talker_config, "model_type", "rope_scaling", "dtype", "architectures"),
        dtype=config.dtype,
        tie_word_embeddings=False,
        architectures=["Qwen3TTSTalker"],
    )


def predictor_config(config: Qwen3TTSTalkerConfig) -> Qwen3OmniMoeTalkerCodePredictorConfig:
    assert config.code_predictor_config is not None
    return Qwen3OmniMoeTalkerCodePredictorConfig(**_without(config.code_predictor_config, "model_type"))


def code2wav_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's config with the fields that vLLM requires of any model. Lengths are in codes, which are
    the stage's prompt."""
    if not isinstance(config, Qwen3TTSTokenizerConfig):
        return config
    assert config.decoder_config is not None
    stage = Qwen3TTSDecoderConfig(
        **_without(config.decoder_config, "model_type"), architectures=["Qwen3TTSCode2Wav"]
    )
    stage.vocab_size = stage.codebook_size
    stage.max_position_embeddings *= stage.num_quantizers
    return stage


def voice_encoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    if not isinstance(config, Qwen3TTSConfig):
        return config
    return Qwen3TTSVoiceEncoderConfig(
        **(config.speaker_encoder_config or {}), architectures=["Qwen3TTSVoiceEncoder"]
    )


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
