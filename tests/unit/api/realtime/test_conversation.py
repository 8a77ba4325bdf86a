"""Items in order, what is kept of them, and truncation."""

import logging

import numpy as np
import pytest

from omni_server.api.realtime.conversation import Conversation
from omni_server.api.realtime.items import AssistantItem, HeardAudio, SpokenAudio, UserItem, WrittenText
from omni_server.errors import InvalidRequestError


def spoken(transcript: str, seconds: float = 10.0) -> SpokenAudio:
    return SpokenAudio(transcript, round(24_000 * seconds))


@pytest.mark.parametrize(
    ("transcript", "heard_ms", "kept"),
    [
        ("one two three four", 10_000, "one two three four"),
        ("one two three four", 5_000, "one two"),
        ("one two three four", 4_000, "one two"),
        ("one two three four", 3_900, "one two"),
        ("one two three four", 3_000, "one"),
        ("one two three four", 500, ""),
        ("one two three four", 0, ""),
        ("你好世界你好世界", 5_000, "你好世界"),
        ("Donaudampfschifffahrtsgesellschaftskapitän", 5_000, "Donaudampfschifffahrts"[:21]),
        ("", 5_000, ""),
    ],
)
def test_text_is_cut_at_the_share_of_the_audio_heard_after_a_whole_word(
    transcript: str, heard_ms: int, kept: str
) -> None:
    part = spoken(transcript)
    part.truncate(heard_ms)
    assert part.transcript == kept
    assert part.is_truncated


def test_text_without_any_audio_is_left_alone_and_marked() -> None:
    part = SpokenAudio("written only", 0)
    part.truncate(0)
    assert (part.transcript, part.is_truncated) == ("written only", True)


def test_the_oldest_items_are_forgotten_when_there_are_too_many() -> None:
    conversation = Conversation()
    for number in range(2005):
        conversation.add(UserItem(str(number), [WrittenText("a")]))
    assert len(conversation.items) == 2000
    assert conversation.find("4") is None
    assert conversation.find("5") is not None


def test_ids_that_clients_choose_write_no_lines_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    conversation = Conversation()
    for number in range(2001):
        conversation.add(UserItem(f"{number}\r\nINFO forged\u2028line", [WrittenText("a")]))
    (line,) = [record.getMessage() for record in caplog.records if "forgetting" in record.getMessage()]
    assert len(line.splitlines()) == 1


def test_the_oldest_audio_is_forgotten_when_it_is_too_much() -> None:
    conversation = Conversation()
    five_minutes = np.zeros(300 * 24_000, dtype=np.int16)
    for number in range(6):
        conversation.add(UserItem(str(number), [HeardAudio(five_minutes, 24_000)]))
    assert [item.id for item in conversation.items] == ["2", "3", "4", "5"]


def test_an_answer_in_progress_is_never_forgotten() -> None:
    conversation = Conversation()
    conversation.add(AssistantItem("answer", [SpokenAudio("")], status="in_progress"))
    for number in range(2005):
        conversation.add(UserItem(str(number), [WrittenText("a")]))
    assert conversation.items[0].id == "answer"


def test_an_item_larger_than_everything_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="larger"):
        Conversation().add(UserItem("a", [WrittenText("a" * (65 * 1024 * 1024))]))
