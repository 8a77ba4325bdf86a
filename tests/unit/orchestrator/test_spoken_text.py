"""Which tokens may be spoken while stop strings can still cut the text."""

import random
from collections.abc import Sequence

import pytest

from omni_server.orchestrator.spoken_text import SpokenText

WORDS = {1: "Hello", 2: " wor", 3: "ld", 4: "", 5: "!"}


def detokenize(token_ids: Sequence[int]) -> str:
    return "".join(WORDS[token_id] for token_id in token_ids)


def test_what_a_stop_string_cut_off_is_never_spoken() -> None:
    spoken = SpokenText(detokenize)
    spoken.push([1, 2], "Hello w")  # "orld" is the stop string
    spoken.push([3], "")
    assert spoken.num_released() == 1


@pytest.mark.parametrize("seed", range(20))
def test_what_may_be_spoken_is_the_same_as_with_all_tokens_decoded_anew(seed: int) -> None:
    rng = random.Random(seed)
    data = "".join(rng.choices("ab é漢👋🏽\u2028", k=60)).encode()
    pieces: dict[int, bytes] = {}
    while data:  # tokens of one to four bytes, which cut characters anywhere
        size = rng.randint(0, 4)
        pieces[len(pieces)] = data[:size]
        data = data[size:]

    def decode(token_ids: Sequence[int]) -> str:
        return b"".join(pieces[token_id] for token_id in token_ids).decode(errors="replace")

    spoken, released = SpokenText(decode), 0
    for count in range(1, len(pieces) + 1):
        text = decode(range(count))
        keep_back = 0 if count == len(pieces) else rng.randint(0, 5)
        end = max(released, len(text) - keep_back)
        spoken.push([count - 1], text[released:end])
        released = end
        ends = [len(decode(range(number + 1))) for number in range(count)]
        expected = next((number for number, length in enumerate(ends) if length > released), count)
        assert spoken.num_released() == expected


def test_a_long_text_is_not_decoded_from_its_beginning_each_time() -> None:
    decoded: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return "word " * len(token_ids)

    spoken = SpokenText(decode)
    for number in range(500):
        spoken.push([number], "word ")
    assert spoken.num_released() == 500
    assert max(decoded) <= 4
