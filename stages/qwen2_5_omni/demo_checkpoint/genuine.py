"""Qwen2.5-Omni-7B as it is published, without its weights: sizes, token ids and limits of the preprocessors.

`qwen2_5_omni_7b.config.json` beside this module has the key names and values of the published config.json.
"""

import json
from pathlib import Path

from stages.qwen2_5_omni.demo_checkpoint.config import Json, Preprocessing

GENUINE_SIZE = "7b"
"""Its name beside those in `SIZES`."""

GENUINE_WEIGHTS_GB = 21
"""10,732,225,408 parameters in bfloat16."""

GENUINE_PREPROCESSING = Preprocessing(max_audio_s=300, max_pixels=12_845_056)

GENUINE_MEL_FRAMES = 400
"""Length of each voice's reference mel."""

_CONFIG_FILE = Path(__file__).parent / "qwen2_5_omni_7b.config.json"


def genuine_model_config() -> Json:
    """The content of config.json."""
    config: Json = json.loads(_CONFIG_FILE.read_text(encoding="utf-8"))
    return config
