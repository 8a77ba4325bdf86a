"""The speech of a text: its passages, one after the other, as one sound."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import numpy as np
import numpy.typing as npt

from omni_server.api.event_feed import follow
from omni_server.api.state import ServerState
from omni_server.errors import InvalidRequestError
from omni_server.generation import Generation, Generator
from omni_server.types import AudioDelta, Finished, OmniRequest


class ReadAloudRun:
    """One request of the model per passage. Each begins when the one before has ended, long before a listener has
    heard it to its end."""

    def __init__(self, generator: Generator, state: ServerState, requests: Sequence[OmniRequest]) -> None:
        self._generator = generator  # not looked up again: a server that drains still ends what it has begun
        self._state = state
        self._requests = requests
        self.input_tokens = 0
        """Of the prompts, as far as `sound` has come."""
        self.output_tokens = 0
        """Codec tokens, likewise."""
        self.num_cut_short = 0
        """Passages whose speech ended at the talker's limit."""

    async def sound(self, heartbeat_s: float | None = None) -> AsyncGenerator[npt.NDArray[np.float32] | None, None]:
        """Pieces of the waveform `[num_samples]`, and None after every `heartbeat_s` seconds of silence.

        Raises what `Generator.submit` and the generation raise. Closing it ends the request that runs.
        """
        for request in self._requests:
            generation = await self._submit(request)
            try:
                async with aclosing(follow(generation, self._state, heartbeat_s)) as events:
                    async for event in events:
                        match event:
                            case None:
                                yield None
                            case AudioDelta() if event.samples.size:
                                yield event.samples
                            case Finished():
                                self._count(event)
            finally:
                await generation.aclose()

    async def _submit(self, request: OmniRequest) -> Generation:
        try:
            return await self._generator.submit(request)
        except InvalidRequestError as error:
            if error.code == "context_length_exceeded":
                error.param = "input"  # what became the prompt here
            raise

    def _count(self, finished: Finished) -> None:
        self.input_tokens += finished.usage.prompt.total
        self.output_tokens += finished.usage.codec_tokens
        self.num_cut_short += finished.finish_reason == "length"
