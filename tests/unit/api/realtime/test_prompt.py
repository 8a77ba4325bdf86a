"""What of a conversation the model reads."""

import numpy as np

from omni_server.api.messages import without_oldest
from omni_server.api.realtime.conversation import messages_of
from omni_server.api.realtime.items import (
    AssistantItem,
    CallItem,
    CallOutputItem,
    HeardAudio,
    Item,
    SpokenAudio,
    UserItem,
    WrittenText,
)
from omni_server.types import AudioPart, ChatMessage, TextPart, ToolCall
from tests.unit.api.fake_generator import MODEL


def heard(transcript: str | None = None) -> HeardAudio:
    return HeardAudio(np.array([0, 16384], dtype=np.int16), 24_000, transcript)


def test_of_recordings_that_do_not_fit_the_transcript_stays_or_nothing() -> None:
    items: list[Item] = [
        UserItem("a", [heard()]),
        AssistantItem("b", [SpokenAudio("Hello.")]),
        UserItem("c", [heard("How are you?")]),
        UserItem("d", [WrittenText("Well?"), heard()]),
        UserItem("e", [heard()]),
    ]
    messages = messages_of(items, "", MODEL)  # two recordings fit
    assert [[type(part) for part in message.content] for message in messages] == [
        [TextPart],
        [TextPart],
        [TextPart, AudioPart],
        [AudioPart],
    ]
    assert messages[1].content == (TextPart("How are you?"),)


def test_a_recording_that_is_named_three_times_counts_three_times() -> None:
    item = UserItem("a", [heard("Hello.")])
    messages = messages_of([item, item, item], "", MODEL)  # two recordings fit
    assert [type(part) for message in messages for part in message.content] == [
        TextPart,
        AudioPart,
        AudioPart,
    ]


def test_answers_that_were_cut_to_nothing_are_left_out() -> None:
    items: list[Item] = [UserItem("a", [WrittenText("hi")]), AssistantItem("b", [SpokenAudio("")])]
    assert [message.role for message in messages_of(items, "", MODEL)] == ["user"]


def test_the_oldest_quarter_goes_and_the_instructions_stay() -> None:
    system = ChatMessage("system", (TextPart("s"),))
    others = tuple(ChatMessage("user", (TextPart(str(number)),)) for number in range(8))
    assert without_oldest((system, *others)) == (system, *others[2:])
    assert without_oldest((system, *others[:2])) == (system, others[1])
    assert without_oldest((system, others[0])) is None
    assert without_oldest(()) is None
    result = ChatMessage("tool", (TextPart("r"),))
    assert without_oldest((system, others[0], result, others[1])) == (system, others[1])


def test_what_the_assistant_says_and_calls_in_one_turn_is_one_message() -> None:
    items: list[Item] = [
        UserItem("a", [WrittenText("Weather?")]),
        AssistantItem("b", [SpokenAudio("Let me see.")]),
        CallItem("c", "1", "weather", "{}"),
        CallItem("d", "2", "time", "{}"),
        CallItem("e", "3", "half", '{"', status="incomplete"),
        CallOutputItem("f", "1", "sunny"),
        CallItem("g", "4", "alone", "{}"),
    ]
    assert messages_of(items, "", MODEL)[1:] == (
        ChatMessage(
            "assistant", (TextPart("Let me see."),), (ToolCall("weather", "{}"), ToolCall("time", "{}"))
        ),
        ChatMessage("tool", (TextPart("sunny"),)),
        ChatMessage("assistant", (), (ToolCall("alone", "{}"),)),
    )
