"""Diffusion stages one behind the other, which make audio of a window of codec tokens."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from omni_server.engine.diffusion_client import DiffusionStageClient
from omni_server.orchestrator.request_timeline import RequestTimeline
from omni_server.protocol.diffusion import encode_stage_result


class Decoder:
    """Sends each window through all stages, the result of one as the input of the next. A window counts as many
    tokens in each of them."""

    def __init__(self, stages: Sequence[DiffusionStageClient]) -> None:
        """The first stage gets windows, the last one returns audio."""
        self._stages = tuple(stages)

    @property
    def name(self) -> str:
        """The stage whose result is the audio."""
        return self._stages[-1].name

    @property
    def window_stage(self) -> str:
        """The stage that gets the windows."""
        return self._stages[0].name

    @asynccontextmanager
    async def needed(self) -> AsyncIterator[None]:
        """See `StageLife.needed`: the block is interrupted if any of the stages goes down."""
        async with AsyncExitStack() as lives:
            for stage in self._stages:
                await lives.enter_async_context(stage.life.needed())
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
        """The audio of a window, `[num_samples]`. Raises as `DiffusionStageClient.run` does."""
        result = await self._stages[0].run(
            window_id, token_ids, payload, priority=priority, num_streams=num_streams
        )
        for before, stage in pairwise(self._stages):
            timeline.mark_output(before.name)
            timeline.mark_submitted(stage.name)
            result = await stage.run(
                window_id,
                token_ids,
                encode_stage_result(payload, result),
                priority=priority,
                num_streams=num_streams,
            )
        return result
