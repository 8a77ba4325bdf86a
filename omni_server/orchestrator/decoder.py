"""A chain of diffusion engines that turns a window of codec tokens into audio, or a prompt into an image."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.errors import CorruptDataError
from omni_server.orchestrator.request_timeline import RequestTimeline
from omni_server.protocol.diffusion import encode_stage_result
from omni_server.protocol.images import StageEvent


class Decoder:
    """The engines that process the inputs of one request. The result of each is the input of the next. An
    input counts the same number of tokens in each of them."""

    def __init__(self, handles: Sequence[DiffusionHandle]) -> None:
        """The first handle receives windows or the prompt; the last one returns audio or the image."""
        self._handles = tuple(handles)

    @property
    def name(self) -> str:
        """The engine that produces the final result."""
        return self._handles[-1].name

    @property
    def stage(self) -> str:
        """The stage that produces the final result."""
        return self._handles[-1].stage

    @property
    def first_stage(self) -> str:
        """The stage that receives the windows or the prompt."""
        return self._handles[0].stage

    @asynccontextmanager
    async def needed(self) -> AsyncIterator[None]:
        """Interrupts the block if any of the engines goes down; see `EngineLife.needed`."""
        async with AsyncExitStack() as lives:
            for handle in self._handles:
                await lives.enter_async_context(handle.life.needed())
            yield

    async def run(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        payload: bytes,
        *,
        priority: int = 0,
        num_streams: int | None = None,
        on_event: Callable[[StageEvent], None] | None = None,
        timeline: RequestTimeline,
    ) -> npt.NDArray[np.float32]:
        """Returns the last result. Other arguments and errors are those of `DiffusionHandle.run`."""
        result = await self._handles[0].run(
            request_id, token_ids, payload, priority=priority, num_streams=num_streams, on_event=on_event
        )
        for before, handle in pairwise(self._handles):
            timeline.mark_output(before.stage)
            if not np.isfinite(result).all():  # the next stage would be blamed
                raise CorruptDataError(
                    before.name, "samples", "NaN or infinity in the result for the next stage"
                )
            timeline.mark_submitted(handle.stage)
            result = await handle.run(
                request_id,
                token_ids,
                encode_stage_result(payload, result),
                priority=priority,
                num_streams=num_streams,
                on_event=on_event,
            )
        return result
