"""A folder with a pipeline and a text model, as the server process sees it."""

from pathlib import Path

import pytest

from omni_server.check.files import small_file_problems, weight_problems
from omni_server.check.safetensors_headers import read_weights
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError
from omni_server.types import ChatMessage, TextPart
from stages.chain import FAMILY
from stages.chain.image_prompt import image_prompt
from stages.chain.text_model import IMAGE_SYSTEM_PROMPT
from tests.chain_folder import make_chain_folder
from tests.toy_families.toy import END

DRAW = (ChatMessage("user", (TextPart("Draw a boat."),)),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chain_folder(tmp_path_factory.mktemp("chain") / "folder")


@pytest.fixture(scope="module")
def config() -> StageConfig:
    stages = {"thinker": {"max_model_len": 512}, "image": {"max_model_len": 256}}
    return StageConfig.model_validate(
        {"model_family": "stages.chain:FAMILY", "platform": "cpu", "stages": stages}
    )


def test_the_text_model_is_told_to_write_a_prompt_only_if_an_image_is_asked_for(folder: Path) -> None:
    model = FAMILY.open(folder)
    plain = model.prompt(DRAW, outputs={"text"})
    drawn = model.prompt(DRAW, outputs={"text", "image"})
    assert plain.text == "[user]Draw a boat.[assistant]"
    assert drawn.text == f"[system]{IMAGE_SYSTEM_PROMPT}[user]Draw a boat.[assistant]"
    own = (ChatMessage("system", (TextPart("Be brief."),)), *DRAW)
    assert model.prompt(own, outputs={"image"}).text == "[system]Be brief.[user]Draw a boat.[assistant]"


def test_text_that_spells_a_special_token_is_not_that_token(folder: Path) -> None:
    message = ChatMessage("user", (TextPart("a<end>b"),))
    prompt = FAMILY.open(folder).prompt((message,), outputs={"text"})
    assert prompt.text == "[user]a<end>b[assistant]"
    assert prompt.pieces == ("[user]a<", "end>b[assistant]")


def test_the_end_tokens_are_those_of_the_text_model(folder: Path) -> None:
    assert FAMILY.open(folder).stop_ids == {"thinker": (END,)}


def test_all_weights_of_both_stages_are_found(folder: Path, config: StageConfig) -> None:
    footprints = FAMILY.footprints(folder, config)
    assert footprints.keys() == {"thinker", "image"}
    assert list(small_file_problems(folder, FAMILY)) == []
    stored = read_weights(folder)
    assert list(weight_problems(folder, stored, footprints)) == []
    counted = [name for footprint in footprints.values() for name in footprint.tensors]
    assert sorted(counted) == sorted(stored.tensors)


def test_a_text_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    folder = make_chain_folder(tmp_path / "chain")
    (folder / "thinker" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"thinker has no chat template"):
        FAMILY.open(folder)


def test_a_pipeline_that_needs_an_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only edits images"):
        FAMILY.open(make_chain_folder(tmp_path / "chain", pipeline="qwen-image-edit"))


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("A boat.\n", "A boat."),
        ("<think>\nA boat?\n</think>\n\nA red boat.", "A red boat."),
        ("<think>never done", "<think>never done"),
    ],
)
def test_the_image_is_drawn_of_what_follows_the_reasoning(text: str, prompt: str) -> None:
    assert image_prompt(text) == prompt
