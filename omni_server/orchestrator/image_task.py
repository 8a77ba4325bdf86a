"""The part of a request that generates an image."""

import asyncio
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import Stage
from omni_server.errors import CorruptDataError
from omni_server.family import DiffusionPrompt
from omni_server.orchestrator.decoder import Decoder
from omni_server.orchestrator.request_graph import RequestGraph
from omni_server.protocol.images import StageEvent, StepProgress
from omni_server.types.images import ImageDone, ImageProgress, ImageSize, PartialImage


@dataclass(eq=False)
class ImageTask:
    """Turns a prompt into an image."""

    graph: RequestGraph
    stages: tuple[Stage[DiffusionHandle], ...]
    """Each stage receives the result of the previous one."""
    prompt: DiffusionPrompt
    size: ImageSize

    async def run(self) -> None:
        graph = self.graph
        decoder = Decoder([graph.choose(stage) for stage in self.stages])
        async with decoder.needed():
            graph.timeline.mark_submitted(decoder.first_stage)
            result = await decoder.run(
                graph.request_id,
                self.prompt.token_ids,
                self.prompt.payload,
                priority=graph.turn.number,
                on_event=self._take,
                timeline=graph.timeline,
            )
        graph.timeline.mark_output(decoder.stage)
        # In a thread: an image of 2048x2048 takes 50 ms.
        pixels = await asyncio.to_thread(_pixels, decoder.name, result, self.size)
        graph.emit(ImageDone(pixels))

    def _take(self, event: StageEvent) -> None:
        if isinstance(event, StepProgress):
            self.graph.emit(ImageProgress(event.step, event.num_steps))
        else:
            self.graph.emit(PartialImage(event.index, event.pixels.array()))


def _pixels(stage: str, result: npt.NDArray[np.float32], size: ImageSize) -> npt.NDArray[np.uint8]:
    """Raises `CorruptDataError` if the result is not an image of that size."""
    if result.shape != (size.height, size.width, 3):
        raise CorruptDataError(stage, "shape", f"{list(result.shape)} is no RGB image of {size} pixels")
    if not (result.min() >= 0 and result.max() <= 1):  # NaN fails either comparison
        raise CorruptDataError(stage, "samples", "pixels that are not in [0, 1]")
    return np.rint(255 * result).astype(np.uint8)
