"""Special token ids of a Qwen2.5-Omni checkpoint, read from its config.json; none are hard-coded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_server.config.checkpoint_files import config_errors
from stages.qwen_omni.config_keys import ConfigKeys


@dataclass(frozen=True)
class SpecialIds:
    """Text ids are in the thinker's vocabulary, codec ids in the talker's."""

    text_end: int  # talker_config.tts_text_end_token_id: its embedding follows the reply's last row, once
    text_pad: int  # talker_config.tts_text_pad_token_id: its embedding follows after that
    im_end: int  # thinker_config.eos_token_id: ends the reply
    audio_placeholder: int
    image_placeholder: int
    video_placeholder: int
    codec_mask: int  # fills the thinker's prompt positions
    codec_pad: int
    codec_start: int  # never sampled
    codec_end: int


def read_special_ids(model_dir: Path) -> SpecialIds:
    """Raises `ConfigError` if config.json lacks one of the keys."""
    keys = ConfigKeys(model_dir, "Qwen2.5-Omni")
    ends = (
        keys.find("thinker_config", "eos_token_id"),
        keys.find("thinker_config", "text_config", "eos_token_id"),
    )
    im_end = next((end for end in ends if isinstance(end, int)), None)
    if im_end is None:
        im_end = _tokenizer_eos(model_dir)
    return SpecialIds(
        text_end=keys.number("talker_config", "tts_text_end_token_id"),
        text_pad=keys.number("talker_config", "tts_text_pad_token_id"),
        im_end=im_end,
        audio_placeholder=keys.number("thinker_config", "audio_token_index"),
        image_placeholder=keys.number("thinker_config", "image_token_index"),
        video_placeholder=keys.number("thinker_config", "video_token_index"),
        codec_mask=keys.number("talker_config", "tts_codec_mask_token_id"),
        codec_pad=keys.number("talker_config", "tts_codec_pad_token_id"),
        codec_start=keys.number("talker_config", "tts_codec_start_token_id"),
        codec_end=keys.number("talker_config", "tts_codec_end_token_id"),
    )


def _tokenizer_eos(model_dir: Path) -> int:
    """The tokenizer's end token, for a config.json that names none for the thinker."""
    with config_errors(f"{model_dir}: neither config.json nor tokenizer_config.json names an end token"):
        tokenizer = json.loads((model_dir / "tokenizer_config.json").read_text())
        eos = tokenizer["eos_token"]
        eos = eos["content"] if isinstance(eos, dict) else eos
        decoder: dict[str, dict[str, Any]] = tokenizer["added_tokens_decoder"]
        return next(int(token_id) for token_id, token in decoder.items() if token["content"] == eos)
