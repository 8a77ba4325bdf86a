"""The text of a request whose entry reads it: given, or still being written."""

import asyncio
from collections.abc import AsyncIterator

from omni_server.engine.prompt_rendering import INLINE_CHARS
from omni_server.errors import InvalidRequestError
from omni_server.family import SpeechPrompt, SpeechText
from omni_server.orchestrator.row_feeder import SpeechTextFeeder


class TextSource:
    """Reads `pieces` as far as the prompt needs, and feeds the rest while the entry runs. Implements
    `omni_server.orchestrator.request_run.GraphTask`."""

    def __init__(self, text: SpeechText, pieces: AsyncIterator[str], *, is_whole: bool) -> None:
        """`is_whole`: all of the text is there, and read before the prompt is made."""
        self._text = text
        self._pieces = pieces
        self._is_whole = is_whole
        self._is_complete = False
        self._feeder: SpeechTextFeeder
        self._task: asyncio.Task[None] | None = None

    async def prompt(self) -> SpeechPrompt:
        """Raises `InvalidRequestError` if the text has no tokens."""
        while not self._is_complete:
            await self._read()
            if not self._is_whole and (prompt := self._text.prompt()) is not None:
                return prompt
        if (prompt := self._text.prompt()) is None:
            raise InvalidRequestError("there is no text to read", param="messages")
        return prompt

    def begin(self, feeder: SpeechTextFeeder) -> None:
        """Feeds what has been read behind the prompt."""
        self._feeder = feeder
        self._feed()

    async def run(self) -> None:
        self._task = asyncio.current_task()
        while not self._is_complete:
            await self._read()
            self._feed()

    def stop(self) -> None:
        """The speech has ended: the rest of the text is not awaited."""
        if self._task is not None:
            self._task.cancel()

    async def _read(self) -> None:
        piece = await anext(self._pieces, None)
        if piece is None:
            self._text.finish()
            self._is_complete = True
        elif len(piece) <= INLINE_CHARS:
            self._text.push(piece)
        else:
            await asyncio.to_thread(self._text.push, piece)

    def _feed(self) -> None:
        self._feeder.speak(self._text.take_ids())
        if self._is_complete:
            self._feeder.finish(self._feeder.num_generated_rows)


async def in_one_piece(text: str) -> AsyncIterator[str]:
    yield text
