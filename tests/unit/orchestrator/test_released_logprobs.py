"""When a token's log-probability may leave."""

import pytest

from omni_server.orchestrator.released_logprobs import ReleasedLogprobs
from omni_server.types import SampledToken, TokenLogprob


def token(utf8: bytes) -> SampledToken:
    return SampledToken(TokenLogprob(utf8.decode(errors="replace"), utf8, -1.0), ())


A, B = token(b"ab"), token(b"cd")
WAVE = "👋".encode()


def test_tokens_wait_for_text_that_may_be_a_stop_string() -> None:
    released = ReleasedLogprobs()
    assert released.push([A, B], "a") == ()
    assert released.push([], "b") == (A,)
    assert released.push([], "cd") == (B,)


def test_what_waits_at_the_end_can_be_had() -> None:
    released = ReleasedLogprobs()
    released.push([A, B], "ab")
    assert released.rest() == (B,)
    assert released.rest() == ()


@pytest.mark.parametrize(
    "broken", [b"\xff", b"\xf0\x9f", b"\xe2\x28", b"\x80\x80", "\N{REPLACEMENT CHARACTER}".encode()]
)
def test_bytes_that_are_no_text_count_as_many_as_they_are(broken: bytes) -> None:
    first = token(broken)
    released = ReleasedLogprobs()
    assert released.push([first, A, B], broken.decode(errors="replace")) == (first,)
    assert released.push([], "ab") == (A,)
    assert released.push([], "cd") == (B,)


def test_broken_character_in_two_tokens_is_one_replacement() -> None:
    first, last = token(WAVE[:1]), token(WAVE[1:2])
    released = ReleasedLogprobs()
    assert released.push([first, last, A], "\N{REPLACEMENT CHARACTER}") == (first, last)
    assert released.push([], "ab") == (A,)
