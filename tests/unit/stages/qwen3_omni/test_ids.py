"""Special ids of a checkpoint, and what is said about a config.json that lacks them."""

import json
from pathlib import Path
from typing import Any

import pytest

from omni_server.errors import ConfigError
from stages.qwen3_omni.ids import read_special_ids

CONFIG: dict[str, Any] = {
    "im_start_token_id": 1,
    "im_end_token_id": 2,
    "user_token_id": 3,
    "assistant_token_id": 4,
    "tts_pad_token_id": 5,
    "tts_bos_token_id": 6,
    "tts_eos_token_id": 7,
    "enable_audio_output": True,
    "thinker_config": {"audio_token_id": 11, "image_token_id": 12, "video_token_id": 13},
    "talker_config": {
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"ethan": 2302, "chelsie": 2301},
    },
}


def checkpoint(folder: Path, **changes: Any) -> Path:
    """With the config's values changed; None removes one."""
    config = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        *parts, name = key.split("__")
        place = config
        for part in parts:
            place = place[part]
        if value is None:
            del place[name]
        else:
            place[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_speech_is_there_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    assert read_special_ids(checkpoint(tmp_path, enable_audio_output=None)).speech is not None


@pytest.mark.parametrize(
    "key",
    [
        "im_start_token_id",
        "tts_eos_token_id",
        "thinker_config__image_token_id",
        "talker_config__codec_bos_id",
        "talker_config__speaker_id",
    ],
)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"is this a Qwen3-Omni.*missing required field `{key.split('__')[-1]}`"
    ):
        read_special_ids(checkpoint(tmp_path, **{key: None}))


@pytest.mark.parametrize("value", ["5", 5.5, True, [5]])
def test_an_id_that_is_no_number_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=r"Expected `int`, got .* `\$.tts_pad_token_id`"):
        read_special_ids(checkpoint(tmp_path, tts_pad_token_id=value))


def test_a_speaker_without_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Expected `int`, got `str` - at `\$.speaker_id\[...\]`"):
        read_special_ids(checkpoint(tmp_path, talker_config__speaker_id={"ethan": "2302"}))


@pytest.mark.parametrize("value", [{}, [], 3])
def test_a_talker_without_speakers_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=r"Expected `object`.* `\$.speaker_id`"):
        read_special_ids(checkpoint(tmp_path, talker_config__speaker_id=value))


@pytest.mark.parametrize("text", ["", "no json", "[" * 200_000])
def test_a_file_that_is_no_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON"):
        read_special_ids(tmp_path)


@pytest.mark.parametrize("text", ["[]", "3", '{"thinker_config": 5}'])
def test_json_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is this a Qwen3-Omni|must hold a JSON object"):
        read_special_ids(tmp_path)
