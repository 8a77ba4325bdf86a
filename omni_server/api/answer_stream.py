"""The events of an answer as the routes want them: with heartbeats, bounded, and ended by the server's abort.

An answer has one generation, one per choice, or one per passage of a text or piece of a recording.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from omni_server.api.state import ObservedGenerator, ServerState
from omni_server.api.unsent import AnswerQueue, ChoiceEvent
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.generation import Generation
from omni_server.types import Finished, OmniEvent, OmniRequest, Usage


async def submit_all(generator: ObservedGenerator, requests: Sequence[OmniRequest]) -> list[Generation]:
    """Submits all choices, or none."""
    generations: list[Generation] = []
    try:
        for request in requests:
            generations.append(await generator.submit(request))
    except BaseException:
        await close_all(generations)
        raise
    return generations


async def close_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        await generation.aclose()


async def follow(
    generation: Generation, state: ServerState, heartbeat_s: float | None = None
) -> AsyncGenerator[OmniEvent | None, None]:
    """`follow_choices` for an answer with one generation, without the index."""
    async with aclosing(follow_choices([generation], state, heartbeat_s)) as events:
        async for event in events:
            yield None if event is None else event[1]


async def follow_choices(
    generations: Sequence[Generation], state: ServerState, heartbeat_s: float | None = None
) -> AsyncGenerator[ChoiceEvent | None, None]:
    """Yields events until every generation has had its `Finished`, and None after every `heartbeat_s`
    seconds of silence.

    Raises what a generation raises, `ServerState.abort_error` when the server aborts, and
    `InvalidRequestError` when more events wait than `ServerState.unsent` allows: the generations are closed
    then, even if the reader does not ask for another event. Otherwise whoever submitted them closes them.
    """
    queue = AnswerQueue(state.unsent, generations[0].request_id, heartbeat_s)
    state.on_abort.add(queue.wake)
    pumps = [asyncio.create_task(_pump(*choice, queue)) for choice in enumerate(generations)]
    try:
        num_running = len(generations)
        while num_running:
            item = await queue.get() if state.abort_error is None else None
            if state.abort_error is not None:  # checked first, or a generation that never pauses would go on
                raise state.abort_error
            if isinstance(item, BaseException):
                raise item
            if item is not None and isinstance(item[1], Finished):
                num_running -= 1
            yield item
    finally:
        state.on_abort.discard(queue.wake)
        queue.close()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, generation: Generation, queue: AnswerQueue) -> None:
    is_finished = False
    try:
        async for event in generation:
            queue.put(index, event)
            if queue.is_dropped:
                await generation.aclose()
                return
            is_finished = isinstance(event, Finished)
    except Exception as error:  # noqa: BLE001 - the reader raises it, behind all events
        queue.put_error(error)
    else:
        if not is_finished:
            queue.put_error(OmniError("The generation ended before it was finished."))


@dataclass
class TaskRun:
    """A task that is cut into several requests: the passages of a text, or the pieces of a recording.

    They run one after the other. Each begins when the one before has ended, which for speech is long
    before a listener has heard it to its end."""

    generator: ObservedGenerator
    """Not looked up again: a server that drains still ends what it has begun."""
    state: ServerState
    requests: Sequence[OmniRequest]
    input_param: str
    """The caller's field that the prompts were made from: errors of the prompt name it."""
    usages: list[Usage] = field(default_factory=list)
    """Of each request that has ended, as far as `events` has come."""
    num_cut_short: int = 0
    """Requests whose text or speech ended at its stage's limit of tokens."""

    async def events(self, heartbeat_s: float | None = None) -> AsyncGenerator[OmniEvent | None, None]:
        """Events of all requests, and None after every `heartbeat_s` seconds of silence.

        Raises what `ObservedGenerator.submit` and the generation raise. Closing it ends the request that runs.
        """
        for request in self.requests:
            generation = await self._submit(request)
            try:
                async with aclosing(follow(generation, self.state, heartbeat_s)) as events:
                    async for event in events:
                        if isinstance(event, Finished):
                            self.usages.append(event.usage)
                            self.num_cut_short += event.finish_reason == "length"
                        yield event
            finally:
                await generation.aclose()

    async def _submit(self, request: OmniRequest) -> Generation:
        try:
            return await self.generator.submit(request)
        except InvalidRequestError as error:
            if error.param == "messages" or error.code == "context_length_exceeded":
                error.param = self.input_param
            raise
