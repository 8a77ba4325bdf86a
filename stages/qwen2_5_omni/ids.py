"""Special token ids of a Qwen2.5-Omni checkpoint, read from its config.json; none are hard-coded."""

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from omni_server.config.checkpoint_files import config_errors, read_json_object


class SpecialIds(Struct, frozen=True):
    """Text ids are in the thinker's vocabulary, codec ids in the talker's."""

    text_end: int = field(name="tts_text_end_token_id")  # its embedding follows the reply's last row, once
    text_pad: int = field(name="tts_text_pad_token_id")  # its embedding follows after that
    im_end: int  # ends the reply
    audio_placeholder: int = field(name="audio_token_index")
    image_placeholder: int = field(name="image_token_index")
    video_placeholder: int = field(name="video_token_index")
    codec_mask: int = field(name="tts_codec_mask_token_id")  # fills the thinker's prompt positions
    codec_pad: int = field(name="tts_codec_pad_token_id")
    codec_start: int = field(name="tts_codec_start_token_id")  # never sampled
    codec_end: int = field(name="tts_codec_end_token_id")


def read_special_ids(model_dir: Path) -> SpecialIds:
    """Raises `ConfigError` if config.json lacks one of the keys."""
    path = model_dir / "config.json"
    config: dict[str, Any] = read_json_object(path)
    with config_errors(f"{path}: is this a Qwen2.5-Omni checkpoint?"):
        thinker = config["thinker_config"]
        ends = (thinker.get("eos_token_id"), (thinker.get("text_config") or {}).get("eos_token_id"))
        im_end = next((end for end in ends if isinstance(end, int)), None)
        if im_end is None:
            im_end = _tokenizer_eos(model_dir)
        of_talker = {
            name: value for name, value in config["talker_config"].items() if name.startswith("tts_")
        }
        return msgspec.convert(thinker | of_talker | {"im_end": im_end}, SpecialIds)


def _tokenizer_eos(model_dir: Path) -> int:
    """The tokenizer's end token, for a config.json that names none for the thinker."""
    with config_errors(f"{model_dir}: neither config.json nor tokenizer_config.json names an end token"):
        tokenizer = json.loads((model_dir / "tokenizer_config.json").read_text())
        eos = tokenizer["eos_token"]
        eos = eos["content"] if isinstance(eos, dict) else eos
        decoder: dict[str, dict[str, Any]] = tokenizer["added_tokens_decoder"]
        return next(int(token_id) for token_id, token in decoder.items() if token["content"] == eos)
