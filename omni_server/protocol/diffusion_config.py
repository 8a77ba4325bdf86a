"""What the server tells the model of a non-autoregressive stage, through vLLM's `additional_config`."""

import hashlib
from typing import Literal

import msgspec
from pydantic import BaseModel

from omni_server.protocol.start_report import ProgressSpec

ComputeDtype = Literal["float32", "bfloat16", "float16"]


class DiffusionRuntimeConfig(msgspec.Struct, frozen=True):
    """Satisfies vLLM's `SupportsHash`."""

    stage: BaseModel
    """The stage as the stage config has it, of the class that the family declares (`StageSpec.config`): the
    options of the model, and the bounds of a step (`max_num_seqs`, `max_num_batched_tokens`,
    `max_model_len`)."""
    compute_dtype: ComputeDtype
    """Type of the model's matrix products. vLLM's own dtype of the stage is float32 whatever this says."""
    is_fast: bool
    """Fused kernels and CUDA graphs."""
    num_streams: int = 0
    """Streams whose state is kept from one window to the next; 0: every window is computed by itself."""
    progress: ProgressSpec | None = None
    """Where the worker reports while it starts; another socket each time."""
    has_low_gpu_priority: bool = False
    """Under NVIDIA's Multi-Process Service: kernels of other stages go first."""
    announces_to: tuple[str, ...] = ()
    """`StepThrottleSpec.socket` of each stage that hears of this one's batches; other sockets each time."""

    def compute_hash(self) -> str:
        """Called by `vllm.config.VllmConfig.compute_hash`."""
        lasting = msgspec.structs.replace(self, progress=None, has_low_gpu_priority=False, announces_to=())
        return hashlib.sha256(repr(lasting).encode()).hexdigest()
