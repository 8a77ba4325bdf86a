"""Answers that may be referred to later are bounded in number and belong to their caller."""

from omni_server.api.messages import AudioHistory


def test_the_oldest_answer_is_forgotten_when_there_are_too_many() -> None:
    caller = AudioHistory(60, 2).of("key-1")
    for name in ("first", "second", "third"):
        caller.add(name, f"said {name}")
    assert [caller.transcript(name) for name in ("first", "second", "third")] == [
        None,
        "said second",
        "said third",
    ]


def test_another_caller_cannot_refer_to_an_answer() -> None:
    history = AudioHistory(60, 2)
    history.of("key-1").add("answer", "a secret")
    assert history.of("key-2").transcript("answer") is None
