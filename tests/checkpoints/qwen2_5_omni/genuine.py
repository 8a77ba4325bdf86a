"""The published Qwen2.5-Omni-7B and -3B without weights: sizes, token ids and limits of the preprocessors.

`7b.config.json` beside this module has the key names and values of the published config.json.
The 3B's differences are second-hand: from copies of its config.json in other projects, checked by the number
of parameters.
"""

import json
from copy import deepcopy
from pathlib import Path

from tests.checkpoints.json_files import Json
from tests.checkpoints.qwen2_5_omni.config import Preprocessing

GENUINE_SIZES = {"7b": 21, "3b": 11}
"""Names in addition to `SIZES` -> GB of weights: 10,732,225,408 and 5,537,120,640 parameters in
bfloat16."""

GENUINE_PREPROCESSING = Preprocessing(max_audio_s=300, max_pixels=12_845_056)

GENUINE_MEL_FRAMES = 400
"""Length of each voice's reference mel."""

_CONFIG_FILE = Path(__file__).parent / "7b.config.json"


_TEXT_3B: Json = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "max_window_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
}
_TALKER_3B: Json = {
    "embedding_size": 2048,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_scaling": {"mrope_section": [16, 16, 0], "rope_type": "default", "type": "default"},
}


def genuine_model_config(size: str) -> Json:
    """The content of config.json. `size` is one of `GENUINE_SIZES`."""
    config = json.loads(_CONFIG_FILE.read_text(encoding="utf-8"))
    if size == "3b":
        thinker = config["thinker_config"]
        thinker["text_config"] |= deepcopy(_TEXT_3B)
        thinker["audio_config"]["output_dim"] = _TEXT_3B["hidden_size"]
        thinker["vision_config"]["out_hidden_size"] = _TEXT_3B["hidden_size"]
        config["talker_config"] |= deepcopy(_TALKER_3B)
    content: Json = config
    return content
