"""The fields of a Qwen3-TTS checkpoint's config files that the server process reads."""

from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from omni_server.config.checkpoint_files import config_errors
from omni_server.errors import ConfigError

CODEC_FOLDER = "speech_tokenizer"
"""The folder of the codec's weights and config in that of the checkpoint."""

NUM_CODEBOOKS = 16

StructT = TypeVar("StructT", bound=msgspec.Struct)


class TransformerSizes(msgspec.Struct, frozen=True):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


class PredictorConfig(TransformerSizes, frozen=True):
    vocab_size: int


class TalkerConfig(TransformerSizes, frozen=True):
    vocab_size: int  # codec tokens
    text_vocab_size: int
    text_hidden_size: int
    num_code_groups: int
    code_predictor_config: PredictorConfig
    codec_pad_id: int
    codec_bos_id: int
    codec_eos_token_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    codec_language_id: dict[str, int]
    spk_id: dict[str, int | tuple[int]] = {}
    spk_is_dialect: dict[str, bool | str] = {}  # the name of the speaker's dialect in `codec_language_id`


class CheckpointConfig(msgspec.Struct, frozen=True):
    tts_model_type: Literal["custom_voice", "voice_design", "base"]
    tts_model_size: str
    tts_pad_token_id: int
    tts_bos_token_id: int
    tts_eos_token_id: int
    talker_config: TalkerConfig
    dtype: str | None = None
    torch_dtype: str | None = None

    @property
    def dtype_name(self) -> str:
        return self.dtype or self.torch_dtype or "bfloat16"


class DecoderConfig(TransformerSizes, frozen=True):
    codebook_size: int
    codebook_dim: int
    latent_dim: int
    decoder_dim: int
    num_quantizers: int
    sliding_window: int
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]


class CodecConfig(msgspec.Struct, frozen=True):
    decoder_config: DecoderConfig


def read_checkpoint_config(model_dir: Path) -> CheckpointConfig:
    """Raises `ConfigError`, as `read_decoder_config` does."""
    config = _read(model_dir / "config.json", CheckpointConfig)
    _check_codebooks("talker_config.num_code_groups", config.talker_config.num_code_groups)
    return config


def read_decoder_config(model_dir: Path) -> DecoderConfig:
    decoder = _read(model_dir / CODEC_FOLDER / "config.json", CodecConfig).decoder_config
    _check_codebooks("decoder_config.num_quantizers", decoder.num_quantizers)
    return decoder


def _read(path: Path, kind: type[StructT]) -> StructT:
    with config_errors(f"{path}: is this a Qwen3-TTS checkpoint?"):
        return msgspec.json.decode(path.read_bytes(), type=kind)


def _check_codebooks(key: str, number: int) -> None:
    if number != NUM_CODEBOOKS:
        raise ConfigError(f"{key} is {number}, and only {NUM_CODEBOOKS} is supported")
