"""The fields of a Qwen3-TTS checkpoint's config.json that the server process reads."""

from pathlib import Path
from typing import Literal

import msgspec

from omni_server.config.checkpoint_files import config_errors
from stages.qwen_codec.codec_layout import check_num_codebooks

CODEC_FOLDER = "speech_tokenizer"
"""The folder of the codec's weights and config in that of the checkpoint."""


class TalkerConfig(msgspec.Struct, frozen=True):
    hidden_size: int
    num_code_groups: int
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


def read_checkpoint_config(model_dir: Path) -> CheckpointConfig:
    """Raises `ConfigError`."""
    path = model_dir / "config.json"
    with config_errors(f"{path}: is this a Qwen3-TTS checkpoint?"):
        config = msgspec.json.decode(path.read_bytes(), type=CheckpointConfig)
    check_num_codebooks("talker_config.num_code_groups", config.talker_config.num_code_groups)
    return config
