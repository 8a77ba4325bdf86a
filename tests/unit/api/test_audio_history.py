"""Answers that may be referred to later are bounded in number and belong to their caller."""

from omni_server.api.messages import AudioHistory


def test_the_oldest_answer_is_forgotten_when_there_are_too_many() -> None:
    history = AudioHistory(60, 2)
    for name in ("first", "second", "third"):
        history.add("key-1", name, f"said {name}")
    assert [history.transcript("key-1", name) for name in ("first", "second", "third")] == [
        None,
        "said second",
        "said third",
    ]
