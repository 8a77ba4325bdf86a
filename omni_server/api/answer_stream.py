"""Streams an answer's events to the routes: bounded, with heartbeats, and ended when the server aborts.

An answer has one generation in total, per choice, per passage of a text or per piece of a recording.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace

from omni_server.api.audio_pace import AudioPace
from omni_server.api.state import ObservedGenerator, ServerState
from omni_server.api.unsent import AnswerQueue, ChoiceEvent
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.generation import Generation
from omni_server.types import Finished, OmniEvent, OmniRequest, Usage


async def submit_all(
    generator: ObservedGenerator, requests: Sequence[OmniRequest], held: AsyncExitStack
) -> list[Generation]:
    """Submits all choices. `held` closes them, also if one is refused."""
    generations: list[Generation] = []
    for request in requests:
        generations.append(await generator.submit(request))
        held.push_async_callback(generations[-1].aclose)
    return generations


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Adds up all choices of one prompt."""
    return replace(
        usages[0],
        text_tokens=sum(usage.text_tokens for usage in usages),
        codec_tokens=sum(usage.codec_tokens for usage in usages),
        image_tokens=sum(usage.image_tokens for usage in usages),
    )


async def follow(
    generations: Sequence[Generation],
    state: ServerState,
    heartbeat_s: float | None = None,
    pace: AudioPace | None = None,
) -> AsyncGenerator[ChoiceEvent | None, None]:
    """Yields events until every generation has finished, and None after every `heartbeat_s` seconds
    of silence. With a `pace`, audio and what is behind it wait until they may be sent.

    Raises what a generation raises, `ServerState.abort_error` when the server aborts, and
    `InvalidRequestError` when the backlog exceeds what `ServerState.unsent` allows. In that last case the
    generations are closed even if the reader requests no further event; otherwise the submitter closes them.
    """
    queue = AnswerQueue(state.unsent, generations[0].request_id, heartbeat_s)
    state.on_abort.add(queue.wake)
    pumps = [asyncio.create_task(_pump(*choice, queue)) for choice in enumerate(generations)]
    try:
        num_running = len(generations)
        while num_running:
            item = await queue.get() if state.abort_error is None else None
            if pace is not None and isinstance(item, tuple):
                while not await pace.wait(item[1], heartbeat_s or math.inf):
                    yield None
            if state.abort_error is not None:  # checked first: a generation may never pause
                raise state.abort_error
            if isinstance(item, BaseException):
                raise item
            if item is not None and isinstance(item[1], Finished):
                num_running -= 1
            yield item
    finally:
        state.on_abort.remove(queue.wake)
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
    """A task split into several requests: the passages of a text or the pieces of a recording.

    They run one after another. For speech, each ends long before a listener has heard all of it, or the
    limit `ApiConfig.max_audio_ahead_s` earlier."""

    generator: ObservedGenerator
    """Not looked up again: a draining server still completes started tasks."""
    state: ServerState
    requests: Sequence[OmniRequest]
    input_param: str
    """The request field that the prompts come from; prompt errors name it."""
    pace: AudioPace | None = None
    """Of all requests together; None sends audio at once."""
    usages: list[Usage] = field(default_factory=list)
    """Usage of each request that has ended so far."""
    num_cut_short: int = 0
    """Requests whose text or speech reached its stage's token limit."""

    async def events(self, heartbeat_s: float | None = None) -> AsyncGenerator[OmniEvent | None, None]:
        """Yields all requests' events, and None after every `heartbeat_s` seconds of silence.

        Raises what `ObservedGenerator.submit` and the generation raise. Closing ends the running request.
        """
        for request in self.requests:
            generation = await self._submit(request)
            try:
                async with aclosing(follow([generation], self.state, heartbeat_s, self.pace)) as events:
                    async for item in events:
                        event = None if item is None else item[1]
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
