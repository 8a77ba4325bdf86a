"""Configuration of the model of a non-autoregressive stage, passed through vLLM's `additional_config`."""

import hashlib
from typing import Literal

import msgspec
from pydantic import BaseModel

from omni_server.protocol.start_report import ProgressSpec

ComputeDtype = Literal["float32", "bfloat16", "float16"]


class DiffusionRuntimeConfig(msgspec.Struct, frozen=True):
    """Satisfies vLLM's `SupportsHash`."""

    stage: BaseModel
    """The stage from the stage config, of the class that the family declares (`StageSpec.config`): the
    options of the model, and the limits of a step (`max_num_seqs`, `max_num_batched_tokens`,
    `max_model_len`)."""
    compute_dtype: ComputeDtype
    """Type of the model's matrix products. vLLM's own dtype of the stage is always float32."""
    is_fast: bool
    """Enables fused kernels and CUDA graphs."""
    num_streams: int = 0
    """Streams whose state is kept from one window to the next. 0: every window is computed independently."""
    progress: ProgressSpec | None = None
    """Where the worker reports during startup; a different socket each time."""
    has_low_gpu_priority: bool = False
    """Under NVIDIA's Multi-Process Service: kernels of other stages take precedence."""

    def compute_hash(self) -> str:
        """Called by `vllm.config.VllmConfig.compute_hash`."""
        lasting = msgspec.structs.replace(self, progress=None, has_low_gpu_priority=False)
        return hashlib.sha256(repr(lasting).encode()).hexdigest()
