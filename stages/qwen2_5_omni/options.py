"""Stage config options of Qwen2.5-Omni's decoder, besides those of every decoder."""

from typing import Annotated

from pydantic import Field

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.frozen_model import FrozenModel
from omni_server.config.stages import DiffusionStage


class SolverConfig(FrozenModel):
    """Flow-matching solver of the DiT, with the defaults of `Qwen2_5OmniToken2WavDiTModel.sample`."""

    num_steps: Annotated[int, Field(ge=2, le=100)] = 10
    """Points of the time grid, one more than Runge-Kutta steps; more is slower and more exact."""
    guidance_scale: Annotated[float, Field(ge=0)] = 0.5
    """Strength of classifier-free guidance."""
    sway_coefficient: float = -1.0
    """Where the time grid is denser; negative values make its beginning denser."""

    @property
    def num_branches(self) -> int:
        """Evaluations at each time: conditional, and from the reference's bound up also unconditional."""
        return 2 if self.guidance_scale >= 1e-5 else 1


class Code2WavStage(DiffusionStage):
    solver: SolverConfig = SolverConfig()
    """How the flow-matching ODE is solved."""


class Code2WavChunks(ChunkPlan):
    """A block is the DiT's attention block, 12 codec tokens in the published checkpoints."""

    vocoder_margin_frames: Annotated[int, Field(ge=0)] = 20
    """Mel frames of context for the vocoder on each side of the emitted frames; 28 is its full receptive
    field."""
