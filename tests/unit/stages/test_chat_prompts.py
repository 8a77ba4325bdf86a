"""The chats of a language model's folder, as the server process renders them."""

from pathlib import Path

import pytest

from omni_server.errors import ConfigError
from omni_server.types import ChatMessage, TextPart
from stages.chat_prompts import PromptRenderer
from tests.toy_families.toy import make_checkpoint

LOOP = "{{% for message in messages %}}[{{{{ message.role }}}}]{content}{{% endfor %}}"
CHAT_TEMPLATE = (
    LOOP.format(content="{{ message.content }}") + "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS = "{% for part in message.content %}{{ part.text }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_checkpoint(tmp_path / "checkpoint", "Qwen2ForCausalLM")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def renderer_of(folder: Path) -> PromptRenderer:
    return PromptRenderer(folder, tools_system_prompt=None)


def test_text_that_spells_a_special_token_is_not_that_token(folder: Path) -> None:
    message = ChatMessage("user", (TextPart("a<end>b"),))
    prompt = renderer_of(folder).render((message,))
    assert prompt.text == "[user]a<end>b[assistant]"
    assert prompt.pieces == ("[user]a<", "end>b[assistant]")


def test_the_tokens_around_a_chat_are_those_of_its_template(folder: Path) -> None:
    assert not renderer_of(folder).render((ChatMessage("user", (TextPart("a"),)),)).add_special_tokens


def test_the_reasoning_of_earlier_answers_is_left_out(folder: Path) -> None:
    messages = [
        ChatMessage(role, (TextPart(f"<think>\nHm.</think>\n\n{text}"),))
        for role, text in (("assistant", "Four."), ("user", "Why?"))
    ]
    assert (
        renderer_of(folder).render(messages).text
        == "[assistant]Four.[user]<think>\nHm.</think>\n\nWhy?[assistant]"
    )


@pytest.mark.parametrize(
    "content",
    [
        "{{ message.content }}",  # writes a list as Python does
        "{{ message.content | trim }}",
        "{{ '' + message.content }}",  # fails
        "{{ message.content.split('</think>')[-1] }}",
        "{% if message.content is string %}{{ message.content }}{% endif %}",  # leaves it out
        PARTS,
        f"{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}{PARTS}{{% endif %}}",
    ],
)
def test_a_template_gets_strings_or_lists_as_it_takes_them(folder: Path, content: str) -> None:
    (folder / "chat_template.jinja").write_text(LOOP.format(content=content))
    message = ChatMessage("user", (TextPart("one"), TextPart(" two")))
    assert renderer_of(folder).render((message,)).text == "[user]one two"


def test_a_model_without_a_chat_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"checkpoint has no chat template"):
        renderer_of(folder)
