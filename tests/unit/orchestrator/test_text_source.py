"""The text of a request whose entry reads it, while it is written."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import pytest

from omni_server.errors import OmniError
from omni_server.family.speech_text import SpeechPrompt
from omni_server.orchestrator.row_feeder import SpeechTextFeeder
from omni_server.orchestrator.text_source import TextSource
from omni_server.protocol.rows import RowsFeed
from omni_server.types import Flush


class LettersAsTokens:
    """Implements `omni_server.family.speech_text.SpeechText`: a prompt has one letter."""

    def __init__(self) -> None:
        self._ids: tuple[int, ...] = ()
        self.token_texts: list[str] = []
        self.num_flushes = 0

    def push(self, text: str) -> None:
        self._ids += tuple(map(ord, text))
        self.token_texts += text

    def flush(self) -> None:
        self.num_flushes += 1

    def finish(self) -> None:
        pass

    @property
    def max_tokens(self) -> int:
        return 10 * len(self.token_texts)

    def prompt(self) -> SpeechPrompt | None:
        if not self._ids:
            return None
        (first, *self._ids) = self._ids
        return SpeechPrompt((first,), b"", text_ids=(), tail_ids=())

    def take_ids(self) -> tuple[int, ...]:
        taken, self._ids = tuple(self._ids), ()
        return taken


class Pieces:
    """An endless text."""

    def __init__(self) -> None:
        self.may_come = asyncio.Event()

    def __aiter__(self) -> "Pieces":
        return self

    async def __anext__(self) -> str:
        await self.may_come.wait()
        await asyncio.sleep(0)
        return "a"


async def read(
    pieces: AsyncIterator[str | Flush],
    on_later_text: Callable[[int], object] = lambda _: None,
    on_end: Callable[[int], object] = lambda _: None,
) -> tuple[TextSource, asyncio.Task[None]]:
    source = TextSource(LettersAsTokens(), pieces, is_whole=False, on_later_text=on_later_text)
    prompt = await source.prompt()
    source.begin(SpeechTextFeeder(list[RowsFeed]().append, prompt, source.stop), on_end)
    return source, asyncio.create_task(source.run())


async def test_text_that_comes_behind_the_prompt_is_counted_and_all_of_it_limits_the_speech() -> None:
    async def pieces() -> AsyncGenerator[str, None]:
        yield "abc"
        yield "de"
        yield "f"

    counts, limits = list[int](), list[int]()
    _, reading = await read(pieces(), counts.append, limits.append)
    await reading
    assert (sum(counts), limits) == (3, [60])


async def test_a_flush_among_the_pieces_makes_the_text_before_it_final() -> None:
    async def pieces() -> AsyncGenerator[str | Flush, None]:
        yield "abc"
        yield Flush.FLUSH
        yield "d"

    text = LettersAsTokens()
    source = TextSource(text, pieces(), is_whole=False, on_later_text=lambda _: None)
    source.begin(SpeechTextFeeder(list[RowsFeed]().append, await source.prompt(), source.stop), None)
    await source.run()
    assert text.num_flushes == 1


async def test_each_frame_is_given_one_token_after_those_of_the_prompt() -> None:
    go_on = asyncio.Event()

    async def pieces() -> AsyncGenerator[str, None]:
        yield "abc"
        await go_on.wait()
        yield "d"

    source, reading = await read(pieces())
    assert [source.given(frame) for frame in range(4)] == ["a", "b", "c", ""]
    assert [source.is_awaited(num_frames) for num_frames in (1, 2, 3)] == [False, False, True]
    go_on.set()
    await reading
    assert source.given(3) == "d"
    assert not source.is_awaited(4)


async def test_a_time_out_of_the_writer_is_not_taken_for_the_request_s() -> None:
    async def pieces() -> AsyncGenerator[str, None]:
        yield "abc"
        raise TimeoutError

    _, reading = await read(pieces())
    with pytest.raises(OmniError, match="text"):
        await reading


async def test_text_that_is_not_needed_any_more_is_not_awaited() -> None:
    pieces = Pieces()
    pieces.may_come.set()
    source, reading = await read(pieces)
    pieces.may_come.clear()
    await asyncio.sleep(0.01)
    source.stop()
    await asyncio.wait([reading])
    assert reading.cancelled()


@pytest.mark.parametrize(
    ("pieces", "spoken"),
    [
        ((" \n", " One", " two ", Flush.FLUSH, "", "\n", "three. \n"), "One two \nthree. \n"),
        ((" ", "\n"), ""),
    ],
)
async def test_white_space_before_the_first_word_is_not_spoken(
    pieces: tuple[str | Flush, ...], spoken: str
) -> None:
    async def written() -> AsyncGenerator[str | Flush, None]:
        for piece in pieces:
            yield piece

    text = LettersAsTokens()
    source = TextSource(text, written(), is_whole=False, on_later_text=lambda _: None)
    if await source.prompt() is not None:
        source.begin(SpeechTextFeeder(lambda _: None, SpeechPrompt((1,), b"", (), ()), lambda: None), None)
        await source.run()
    assert "".join(text.token_texts) == spoken
