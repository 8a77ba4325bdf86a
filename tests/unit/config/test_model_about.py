"""`about.json` of a checkpoint."""

import json
from pathlib import Path

import pytest

from omni_server.config.model_folder import read_about
from omni_server.errors import ConfigError
from omni_server.types import AboutModel


def write(folder: Path, content: object) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "about.json").write_text(text, encoding="utf-8")
    return folder


def test_checkpoint_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert read_about(tmp_path) is None


def test_notice_and_examples_are_read(tmp_path: Path) -> None:
    about = read_about(
        write(tmp_path, {"notice": "A demo – no more.", "example_prompts": ["What are you?", "Why?"]})
    )
    assert about == AboutModel("A demo – no more.", ("What are you?", "Why?"))


def test_either_may_be_missing(tmp_path: Path) -> None:
    assert read_about(write(tmp_path, {"notice": "A demo."})) == AboutModel("A demo.", ())
    assert read_about(write(tmp_path, {"longest_passage": 80})) == AboutModel(None, (), 80)
    assert read_about(write(tmp_path, {"example_prompts": ["Why?"]})) == AboutModel(None, ("Why?",))
    about = read_about(write(tmp_path, {"understands_speech": False}))
    assert about == AboutModel(understands_speech=False)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("{", "Invalid JSON"),
        ([], "object"),
        ({"notice": 7}, "notice: "),
        ({"notice": " "}, "notice: "),
        ({"example_prompts": "Why?"}, "example_prompts: "),
        ({"example_prompts": ["Why?", ""]}, "example_prompts.1: "),
        ({"example_prompts": ["Why?"] * 9}, "example_prompts: "),
        ({"demo": True}, "demo: "),
    ],
)
def test_broken_file_is_told_in_one_line(tmp_path: Path, content: object, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_about(write(tmp_path, content))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/about.json: ")
    assert place in message
    assert "\n" not in message


def test_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "about.json").mkdir()
    with pytest.raises(ConfigError, match=r"about\.json: cannot be read: Is a directory"):
        read_about(tmp_path)


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    (tmp_path / "about.json").write_bytes(b'{"notice": "\xff"}')
    with pytest.raises(ConfigError, match=r"about\.json: "):
        read_about(tmp_path)
