"""Stage config options of Qwen3-TTS's voice encoder."""

from typing import ClassVar

from omni_server.config.stages import DiffusionStage
from omni_server.protocol.diffusion_config import ComputeDtype


class VoiceEncoderStage(DiffusionStage):
    gpu_dtype: ClassVar[ComputeDtype] = "float32"
    """A voice is computed once. Rounding changes its codes."""
