"""Stage config options of Qwen3-Omni's decoder: those of every decoder, with another default."""

from typing import ClassVar

from omni_server.config.stages import DiffusionStage
from omni_server.protocol.diffusion_config import ComputeDtype


class Code2WavStage(DiffusionStage):
    gpu_dtype: ClassVar[ComputeDtype] = "bfloat16"
    """The checkpoints' own. Nothing is known of float16 with their weights: `Snake` divides by exp(beta), and
    the first transformer layers add up without normalization."""
