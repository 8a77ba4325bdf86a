"""A language model's folder, as the server process sees it."""

from pathlib import Path

import pytest
from stages.text_model import TextModel

from omni_server.errors import ConfigError
from omni_server.types import ChatMessage, TextPart
from tests.toy_families.toy import END, make_checkpoint

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_checkpoint(tmp_path / "checkpoint", "Qwen2ForCausalLM")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def test_text_that_spells_a_special_token_is_not_that_token(folder: Path) -> None:
    message = ChatMessage("user", (TextPart("a<end>b"),))
    prompt = TextModel(folder).prompt((message,))
    assert prompt.text == "[user]a<end>b[assistant]"
    assert prompt.pieces == ("[user]a<", "end>b[assistant]")


def test_the_end_tokens_are_those_of_the_folder(folder: Path) -> None:
    assert TextModel(folder).stop_ids == (END,)


def test_a_text_model_without_a_chat_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"checkpoint has no chat template"):
        TextModel(folder)
