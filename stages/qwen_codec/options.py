"""Stage config options of codecs: those of every decoder, with other defaults."""

from typing import ClassVar

from omni_server.config.stages import DiffusionStage
from omni_server.protocol.diffusion_config import ComputeDtype


class Code2WavStage(DiffusionStage):
    gpu_dtype: ClassVar[ComputeDtype] = "bfloat16"
    """The checkpoints' own. float16 rounds less, but whether activations of trained weights stay in its range
    is not known, and the clipping of the samples would hide an overflow."""


class VoiceEncoderStage(DiffusionStage):
    gpu_dtype: ClassVar[ComputeDtype] = "float32"
    """A voice is computed once. Rounding changes its codes."""
