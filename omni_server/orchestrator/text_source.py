"""The text that a stage of a request reads: given, or still being written."""

import asyncio
from collections.abc import AsyncIterator, Callable

from omni_server.engine.prompt_rendering import INLINE_CHARS
from omni_server.errors import OmniError
from omni_server.family.speech_text import SpeechPrompt, SpeechText, SpokenTextFilter
from omni_server.orchestrator.row_feeder import SpeechTextFeeder
from omni_server.types import Flush


class TextSource:
    """Reads `pieces` as far as the prompt needs, and feeds the rest while the stage runs."""

    def __init__(
        self,
        text: SpeechText,
        pieces: AsyncIterator[str | Flush],
        *,
        is_whole: bool,
        on_later_text: Callable[[int], object],
    ) -> None:
        """`is_whole`: all of the text is there, and read before the prompt is made. `on_later_text` is told
        how many tokens `run` has read."""
        self._text = text
        self._on_later_text = on_later_text
        self._pieces = pieces
        self.is_whole = is_whole
        self._is_complete = False
        self._feeder: SpeechTextFeeder
        self._on_end: Callable[[int], object] | None
        self._task: asyncio.Task[None] | None = None
        self._has_words = False

    async def prompt(self) -> SpeechPrompt | None:
        """Returns None if all of the text has no tokens."""
        while not self._is_complete:
            await self._read()
            if not self.is_whole and (prompt := self._text.prompt()) is not None:
                return prompt
        return self._text.prompt()

    def begin(self, feeder: SpeechTextFeeder, on_end: Callable[[int], object] | None) -> None:
        """Feeds what has been read behind the prompt. `on_end` is told the most tokens of the speech of all
        of the text."""
        self._feeder, self._on_end = feeder, on_end
        self._feed()
        self._num_prompted = len(self._text.token_texts) - feeder.num_generated_rows

    async def run(self) -> None:
        self._task = asyncio.current_task()
        while not self._is_complete:
            await self._read()
            self._on_later_text(self._feed())

    def is_awaited(self, num_frames: int) -> bool:
        """Whether so many frames are all that can be spoken before more text comes."""
        return not self._is_complete and num_frames > self._feeder.num_generated_rows

    def given(self, frame: int) -> str:
        """What the entry was given with this frame, besides what it had before: the tokens in the prompt with
        the first one, and a token with each later one."""
        end = self._num_prompted + frame
        return "".join(self._text.token_texts[max(0, end - 1) if frame else 0 : max(0, end)])

    def stop(self) -> None:
        """The speech has ended: the rest of the text is not awaited."""
        if self._task is not None:
            self._task.cancel()

    async def _read(self) -> None:
        try:
            piece = await anext(self._pieces, None)
        except TimeoutError as error:  # not that of the request's deadline
            raise OmniError("the text did not come in time") from error
        if piece is None:
            self._text.finish()
            self._is_complete = True
        elif isinstance(piece, Flush):
            self._text.flush()
        else:
            if not self.is_whole and not self._has_words:
                piece = piece.lstrip()  # as over HTTP
                self._has_words = bool(piece)
            if len(piece) <= INLINE_CHARS:
                self._text.push(piece)
            else:
                await asyncio.to_thread(self._text.push, piece)
        await asyncio.sleep(0)  # many pieces may have come already, and others must not wait for all of them

    def _feed(self) -> int:
        """Returns the number of tokens."""
        ids = self._text.take_ids()
        self._feeder.speak(ids)
        if self._is_complete:
            self._feeder.finish(self._feeder.num_generated_rows)
            if self._on_end is not None:
                self._on_end(self._text.max_tokens)
        return len(ids)


async def in_one_piece(text: str) -> AsyncIterator[str | Flush]:
    yield text


class WrittenText:
    """What may be spoken of a text while it is written: the pieces of a `TextSource`."""

    def __init__(self, spoken: SpokenTextFilter) -> None:
        self._filter = spoken
        self._pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._space = ""

    def push(self, text: str) -> None:
        self._put(self._filter.push(text))

    def finish(self) -> None:
        self._put(self._filter.finish())
        self._pieces.put_nowait(None)

    def _put(self, text: str) -> None:
        """White space waits for the word behind it: at the end of the text, it is not spoken."""
        text = self._space + text
        end = len(text.rstrip())
        self._space = text[end:]
        if end:
            self._pieces.put_nowait(text[:end])

    async def pieces(self) -> AsyncIterator[str]:
        while (piece := await self._pieces.get()) is not None:
            yield piece
