"""Which cases `omni-server verify` asks."""

import pytest

from omni_server.errors import ConfigError
from omni_server.types import ChatMessage, Task, TextPart, VideoPart
from omni_server.verify.cases import Prompt, all_prompts, cases_of, chosen


def task_messages(task: Task) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", (TextPart(str(task)),)),)


@pytest.fixture
def prompts() -> tuple[Prompt, ...]:
    return all_prompts(task_messages)


def videos_of(prompts: tuple[Prompt, ...]) -> list[VideoPart]:
    parts = [part for prompt in prompts for message in prompt.messages for part in message.content]
    return [part for part in parts if isinstance(part, VideoPart)]


def test_a_model_that_does_not_hear_videos_gets_none_with_sound() -> None:
    videos = videos_of(all_prompts(task_messages, with_tracks=False))
    assert videos
    assert all(video.audio is None for video in videos)


def test_each_prompt_is_answered_in_text_and_in_each_voice(prompts: tuple[Prompt, ...]) -> None:
    names = [case.name for case in cases_of(chosen(prompts, "image"), ("Chelsie", "Ethan"))]
    assert names == ["image, text only", "image, Chelsie", "image, Ethan"]


def test_a_text_to_be_read_aloud_is_spoken_only(prompts: tuple[Prompt, ...]) -> None:
    assert [case.name for case in cases_of(chosen(prompts, "read aloud"), ("Ethan",))] == [
        "read aloud, Ethan"
    ]


def test_without_a_talker_all_is_text(prompts: tuple[Prompt, ...]) -> None:
    assert {case.voice for case in cases_of(prompts, ())} == {None}


def test_without_a_talker_nothing_can_be_read_aloud(prompts: tuple[Prompt, ...]) -> None:
    with pytest.raises(ConfigError, match="does not speak"):
        cases_of(chosen(prompts, "read aloud"), ())


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (None, None),
        ("2", ["text", "system prompt"]),
        ("99", None),
        ("video, text,video", ["video", "text"]),
    ],
)
def test_prompts_are_chosen_by_number_and_by_name(
    prompts: tuple[Prompt, ...], wanted: str | None, names: list[str] | None
) -> None:
    expected = [prompt.name for prompt in prompts] if names is None else names
    assert [prompt.name for prompt in chosen(prompts, wanted)] == expected


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [("0", "compares nothing"), ("text,vidoe", "no 'vidoe'; prompts are text, system prompt")],
)
def test_a_wrong_choice_is_refused_with_what_there_is(
    prompts: tuple[Prompt, ...], wanted: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        chosen(prompts, wanted)


def test_a_model_that_takes_text_only_is_asked_in_text_only() -> None:
    prompts = all_prompts(task_messages, with_media=False)
    parts = [part for prompt in prompts for message in prompt.messages for part in message.content]
    assert {type(part) for part in parts} == {TextPart}
    assert len(prompts) == 5


def test_a_model_that_writes_no_text_is_asked_in_every_voice(prompts: tuple[Prompt, ...]) -> None:
    cases = cases_of(prompts, ("Low", "High"), in_text=False)
    assert {case.voice for case in cases} == {"Low", "High"}
    assert len(cases) == 2 * len(prompts)


def test_a_model_that_only_reads_aloud_gets_texts_and_no_chats() -> None:
    prompts = all_prompts(task_messages, with_chats=False)
    assert len(prompts) > 1
    assert all(prompt.text for prompt in prompts)
