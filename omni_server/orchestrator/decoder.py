"""Diffusion engines one behind the other, which make audio of a window of codec tokens."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.errors import CorruptDataError
from omni_server.orchestrator.request_timeline import RequestTimeline
from omni_server.protocol.diffusion import encode_stage_result


class Decoder:
    """The engines that one stream's windows go through, the result of one as the input of the next. A window
    counts as many tokens in each of them."""

    def __init__(self, handles: Sequence[DiffusionHandle]) -> None:
        """The first one gets windows, the last one returns audio."""
        self._handles = tuple(handles)

    @property
    def name(self) -> str:
        """The stage whose result is the audio."""
        return self._handles[-1].name

    @property
    def window_stage(self) -> str:
        """The stage that gets the windows."""
        return self._handles[0].name

    @asynccontextmanager
    async def needed(self) -> AsyncIterator[None]:
        """See `EngineLife.needed`: the block is interrupted if any of the engines goes down."""
        async with AsyncExitStack() as lives:
            for handle in self._handles:
                await lives.enter_async_context(handle.life.needed())
            yield

    async def run(
        self,
        window_id: str,
        token_ids: tuple[int, ...],
        payload: bytes,
        *,
        priority: int,
        num_streams: int,
        timeline: RequestTimeline,
    ) -> npt.NDArray[np.float32]:
        """The audio of a window, `[num_samples]`. Raises as `DiffusionHandle.run` does."""
        result = await self._handles[0].run(
            window_id, token_ids, payload, priority=priority, num_streams=num_streams
        )
        for before, handle in pairwise(self._handles):
            timeline.mark_output(before.name)
            if not np.isfinite(result).all():  # the next one would answer for it
                raise CorruptDataError(
                    before.name, "samples", "NaN or infinity in the result for the next stage"
                )
            timeline.mark_submitted(handle.name)
            result = await handle.run(
                window_id,
                token_ids,
                encode_stage_result(payload, result),
                priority=priority,
                num_streams=num_streams,
            )
        return result
