"""The published Qwen3-Omni-30B-A3B-Instruct without weights: sizes, token ids, limits of the preprocessors.

`30b.config.json` beside this module has the key names and values of the published config.json.
"""

import json
from pathlib import Path

from tests.checkpoints.json_files import Json
from tests.checkpoints.qwen3_omni.config import Preprocessing

GENUINE_SIZES = {"30b": 71}
"""Names in addition to `SIZES` -> GB of weights: 35,259,818,545 parameters in bfloat16."""

GENUINE_PREPROCESSING = Preprocessing(max_pixels=12_845_056)

_CONFIG_FILE = Path(__file__).parent / "30b.config.json"


def genuine_model_config() -> Json:
    """The content of config.json."""
    content: Json = json.loads(_CONFIG_FILE.read_text(encoding="utf-8"))
    return content
