"""A task that is cut into several requests of the model: the passages of a text, or the pieces
of a recording."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from omni_server.api.answer_stream import follow
from omni_server.api.state import ObservedGenerator, ServerState
from omni_server.errors import InvalidRequestError
from omni_server.generation import Generation
from omni_server.types import Finished, OmniEvent, OmniRequest, Usage


class TaskRun:
    """The requests, one after the other. Each begins when the one before has ended, which for speech is long
    before a listener has heard it to its end."""

    def __init__(
        self,
        generator: ObservedGenerator,
        state: ServerState,
        requests: Sequence[OmniRequest],
        *,
        input_param: str,
    ) -> None:
        """`input_param` is the caller's field that the prompts were made from: errors of the
        prompt name it."""
        self._generator = generator  # not looked up again: a server that drains still ends what it has begun
        self._state = state
        self._requests = requests
        self._input_param = input_param
        self.usages: list[Usage] = []
        """Of each request that has ended, as far as `events` has come."""
        self.num_cut_short = 0
        """Requests whose text or speech ended at its stage's limit of tokens."""

    async def events(self, heartbeat_s: float | None = None) -> AsyncGenerator[OmniEvent | None, None]:
        """Events of all requests, and None after every `heartbeat_s` seconds of silence.

        Raises what `ObservedGenerator.submit` and the generation raise. Closing it ends the request that runs.
        """
        for request in self._requests:
            generation = await self._submit(request)
            try:
                async with aclosing(follow(generation, self._state, heartbeat_s)) as events:
                    async for event in events:
                        if isinstance(event, Finished):
                            self.usages.append(event.usage)
                            self.num_cut_short += event.finish_reason == "length"
                        yield event
            finally:
                await generation.aclose()

    async def _submit(self, request: OmniRequest) -> Generation:
        try:
            return await self._generator.submit(request)
        except InvalidRequestError as error:
            if error.param == "messages" or error.code == "context_length_exceeded":
                error.param = self._input_param
            raise
