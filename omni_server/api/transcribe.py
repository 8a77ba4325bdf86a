"""What is said in a recording: its pieces, one after the other, as one text."""

import unicodedata
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from omni_server.api.event_feed import follow
from omni_server.api.state import ServerState
from omni_server.api.transcription_schemas import InputTokenDetails, TokenUsage
from omni_server.errors import InvalidRequestError
from omni_server.generation import Generation, Generator
from omni_server.types import Finished, OmniRequest, TextDelta


class TranscribeRun:
    """One request of the model per piece. Each begins when the one before has ended."""

    def __init__(self, generator: Generator, state: ServerState, requests: Sequence[OmniRequest]) -> None:
        self._generator = generator  # not looked up again: a server that drains still ends what it has begun
        self._state = state
        self._requests = requests
        self._prompt_tokens = 0
        self._audio_tokens = 0
        self._text_tokens = 0
        self.num_cut_short = 0
        """Pieces whose text ended at the thinker's limit."""
        self.text = ""
        """As far as `deltas` has come."""

    @property
    def usage(self) -> TokenUsage:
        """As far as `deltas` has come."""
        return TokenUsage(
            type="tokens",
            input_tokens=self._prompt_tokens,
            input_token_details=InputTokenDetails(
                text_tokens=self._prompt_tokens - self._audio_tokens, audio_tokens=self._audio_tokens
            ),
            output_tokens=self._text_tokens,
            total_tokens=self._prompt_tokens + self._text_tokens,
        )

    async def deltas(self, heartbeat_s: float | None = None) -> AsyncGenerator[str | None, None]:
        """New text, never empty, and None after every `heartbeat_s` seconds of silence.

        Raises what `Generator.submit` and the generation raise. Closing it ends the request that runs.
        """
        for request in self._requests:
            generation = await self._submit(request)
            is_first = True
            try:
                async with aclosing(follow(generation, self._state, heartbeat_s)) as events:
                    async for event in events:
                        match event:
                            case None:
                                yield None
                            case TextDelta():
                                new = event.text.lstrip() if is_first else event.text
                                if new:
                                    delta = _separator(self.text, new) + new if is_first else new
                                    is_first = False
                                    self.text += delta
                                    yield delta
                            case Finished():
                                self._count(event)
            finally:
                await generation.aclose()

    async def _submit(self, request: OmniRequest) -> Generation:
        try:
            return await self._generator.submit(request)
        except InvalidRequestError as error:
            if error.param == "messages":
                error.param = "file"  # what became the prompt here
            raise

    def _count(self, finished: Finished) -> None:
        self._prompt_tokens += finished.usage.prompt.total
        self._audio_tokens += finished.usage.prompt.audio
        self._text_tokens += finished.usage.text_tokens
        self.num_cut_short += finished.finish_reason == "length"


def _separator(before: str, after: str) -> str:
    """A space between the texts of two pieces, except in scripts that have none."""
    if not before or before[-1].isspace():
        return ""
    return "" if any(unicodedata.east_asian_width(c) in "WF" for c in (before[-1], after[0])) else " "
