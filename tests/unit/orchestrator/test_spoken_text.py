"""Which tokens may be spoken while stop strings can still cut the text."""

from collections.abc import Sequence

from omni_server.orchestrator.spoken_text import SpokenText

WORDS = {1: "Hello", 2: " wor", 3: "ld", 4: "", 5: "!"}


def detokenize(token_ids: Sequence[int]) -> str:
    return "".join(WORDS[token_id] for token_id in token_ids)


def test_nothing_is_speakable_before_anything_came() -> None:
    assert SpokenText(detokenize).num_speakable() == 0


def test_a_token_may_be_spoken_when_all_of_its_text_has_been_released() -> None:
    spoken = SpokenText(detokenize)
    spoken.push([1], "Hell")
    assert spoken.num_speakable() == 0
    spoken.push([2], "o wo")
    assert spoken.num_speakable() == 1
    spoken.push([3], "rld")
    assert spoken.num_speakable() == 3


def test_several_tokens_may_come_at_once() -> None:
    spoken = SpokenText(detokenize)
    spoken.push([1, 2, 3, 5], "Hello world")
    assert spoken.num_speakable() == 3
    spoken.push([], "!")
    assert spoken.num_speakable() == 4


def test_a_token_without_text_goes_with_the_one_before_it() -> None:
    spoken = SpokenText(detokenize)
    spoken.push([1, 4, 2], "Hello")
    assert spoken.num_speakable() == 2


def test_what_a_stop_string_cut_off_is_never_spoken() -> None:
    spoken = SpokenText(detokenize)
    spoken.push([1, 2], "Hello w")  # "orld" is the stop string
    spoken.push([3], "")
    assert spoken.num_speakable() == 1


def test_a_character_of_two_tokens_is_spoken_when_both_are_there() -> None:
    pieces = {7: "é".encode()[:1], 8: "é".encode()[1:]}

    def decode(token_ids: Sequence[int]) -> str:
        return b"".join(pieces[token_id] for token_id in token_ids).decode(errors="replace")

    spoken = SpokenText(decode)
    spoken.push([7], "")
    assert spoken.num_speakable() == 0
    spoken.push([8], "é")
    assert spoken.num_speakable() == 2
