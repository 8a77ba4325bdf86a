"""The talker's prompt of a chat. tests/integration/test_qwen3_thinker.py compares it with transformers'
own."""

import pytest

from omni_server.errors import ConfigError
from stages.qwen3_omni.ids import SpecialIds, SpeechIds
from stages.qwen3_omni.talker_prompt import talker_prompt

IM_START, IM_END, SYSTEM, USER, ASSISTANT, NEWLINE = 50, 51, 52, 53, 54, 55
AUDIO, IMAGE, VIDEO = 61, 62, 63
IDS = SpecialIds(
    im_start=IM_START,
    im_end=IM_END,
    user=USER,
    assistant=ASSISTANT,
    audio_placeholder=AUDIO,
    image_placeholder=IMAGE,
    video_placeholder=VIDEO,
    speech=SpeechIds(
        tts_pad=71,
        tts_bos=72,
        tts_eos=73,
        codec_pad=2148,
        codec_bos=2149,
        codec_eos=2150,
        codec_nothink=2155,
        codec_think_bos=2156,
        codec_think_eos=2157,
        speakers={"ethan": 2302, "chelsie": 2301},
    ),
)


def turn(role: int, *token_ids: int) -> list[int]:
    return [IM_START, role, NEWLINE, *token_ids, IM_END, NEWLINE]


BEGUN = [IM_START, ASSISTANT, NEWLINE]
CHATS = {
    "text": [*turn(USER, 1, 2, 3), *BEGUN],
    "a system prompt": [*turn(SYSTEM, 9, 9), *turn(USER, 1, 2, 3), *BEGUN],
    "media": [*turn(SYSTEM, 9), *turn(USER, 5, AUDIO, AUDIO, 6, IMAGE, VIDEO, VIDEO, 7), *BEGUN],
    "several turns": [
        *turn(SYSTEM, 9),
        *turn(USER, IMAGE, IMAGE, 1),
        *turn(ASSISTANT, 2, 3),
        *turn(USER, 4, AUDIO),
        *turn(ASSISTANT),
        *turn(USER, 5, 6),
        *BEGUN,
    ],
    "media of others": [
        *turn(SYSTEM, IMAGE),
        *turn(USER, 1),
        *turn(ASSISTANT, AUDIO),
        *turn(USER, 2),
        *BEGUN,
    ],
}


@pytest.mark.parametrize("name", list(CHATS))
def test_the_prompts_own_ids_are_never_sampled(name: str) -> None:
    """The reference applies its repetition penalty to generated codes only, which are below 2048."""
    prompt = talker_prompt(IDS, CHATS[name], "ethan")
    assert prompt.text is not None
    assert min(prompt.token_ids) >= 2048
    assert len(prompt.text.row_ids) == len(prompt.token_ids) - 1


@pytest.mark.parametrize("name", ["text", "a system prompt", "media of others"])
def test_a_chat_whose_user_sends_text_only_needs_no_rows(name: str) -> None:
    text = talker_prompt(IDS, CHATS[name], "ethan").text
    assert text is not None
    assert not text.has_media


def test_a_chat_without_the_user_has_a_prompt_too() -> None:
    prompt = talker_prompt(IDS, [*turn(SYSTEM, 9), *BEGUN], "ethan")
    assert prompt.num_replaced == 3
    assert prompt.text is not None
    assert prompt.text.row_ids == (*BEGUN, 71, 71, 71, 71, 72)
    assert prompt.text.spans == ()


@pytest.mark.parametrize("source", [[], [IM_START], turn(USER, 1), [*turn(USER, 1), *BEGUN, 5]])
def test_a_prompt_that_ends_otherwise_is_refused(source: list[int]) -> None:
    with pytest.raises(ConfigError, match="does not end where the assistant's turn begins"):
        talker_prompt(IDS, source, "ethan")


def test_a_checkpoint_without_a_talker_has_no_prompt() -> None:
    ids = SpecialIds(IM_START, IM_END, USER, ASSISTANT, AUDIO, IMAGE, VIDEO, speech=None)
    with pytest.raises(ConfigError, match="no talker"):
        talker_prompt(ids, CHATS["text"], "ethan")
