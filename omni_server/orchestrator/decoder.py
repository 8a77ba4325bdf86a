"""Diffusion stages one behind the other, which make audio of a window of codec tokens, or an image of a
prompt."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from omni_server.engine.diffusion_client import DiffusionStageClient
from omni_server.orchestrator.request_timeline import RequestTimeline
from omni_server.protocol.diffusion import encode_stage_result


class Decoder:
    """Sends each input through all stages, the result of one as the input of the next. An input counts as many
    tokens in each of them."""

    def __init__(self, stages: Sequence[DiffusionStageClient]) -> None:
        """The first stage gets windows or prompts, the last one returns audio or an image."""
        self._stages = tuple(stages)

    @property
    def name(self) -> str:
        """The stage whose result it is."""
        return self._stages[-1].name

    @property
    def first_stage(self) -> str:
        """The stage that gets the windows, or the prompt."""
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
        request_id: str,
        token_ids: tuple[int, ...],
        payload: bytes,
        *,
        priority: int = 0,
        num_streams: int | None = None,
        timeline: RequestTimeline,
    ) -> npt.NDArray[np.float32]:
        """The last stage's result. Other arguments and errors are those of `DiffusionStageClient.run`."""
        result = await self._stages[0].run(
            request_id, token_ids, payload, priority=priority, num_streams=num_streams
        )
        for before, stage in pairwise(self._stages):
            timeline.mark_output(before.name)
            timeline.mark_submitted(stage.name)
            result = await stage.run(
                request_id,
                token_ids,
                encode_stage_result(payload, result),
                priority=priority,
                num_streams=num_streams,
            )
        return result
