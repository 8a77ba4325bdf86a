"""What a stage config may say of Qwen2.5-Omni's decoder, beside what it may say of any."""

from typing import Annotated

from pydantic import Field

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.frozen_model import FrozenModel
from omni_server.config.stages import DiffusionStage


class SolverConfig(FrozenModel):
    """Flow-matching solver of the DiT, with the defaults of `Qwen2_5OmniToken2WavDiTModel.sample`."""

    num_steps: Annotated[int, Field(ge=2, le=100)] = 10
    """Points of the time grid, one Runge-Kutta step fewer; more is slower and more exact."""
    guidance_scale: Annotated[float, Field(ge=0)] = 0.5
    """Strength of classifier-free guidance."""
    sway_coefficient: float = -1.0
    """Where the grid is denser; negative is at the beginning."""

    @property
    def num_branches(self) -> int:
        """Evaluations at each time: with the condition and, from the reference's bound on, without it."""
        return 2 if self.guidance_scale >= 1e-5 else 1


class Code2WavStage(DiffusionStage):
    solver: SolverConfig = SolverConfig()
    """How the flow-matching equation is solved."""


class Code2WavChunks(ChunkPlan):
    """A block is the DiT's attention block, 12 codec tokens in the published checkpoints."""

    vocoder_margin_frames: Annotated[int, Field(ge=0)] = 20
    """Mel frames of context that the vocoder gets on each side of what is emitted; 28 is its full field."""
