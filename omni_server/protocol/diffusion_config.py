"""What the server tells the model of a non-autoregressive stage, through vLLM's `additional_config`."""

import hashlib
from typing import Literal

import msgspec

from omni_server.protocol.start_report import ProgressSpec

ComputeDtype = Literal["float32", "bfloat16", "float16"]


class FlowSolver(msgspec.Struct, frozen=True):
    """The flow-matching solver; see `omni_server.config.stages.SolverConfig`."""

    num_steps: int
    guidance_scale: float
    sway_coefficient: float


class DiffusionRuntimeConfig(msgspec.Struct, frozen=True):
    """Satisfies vLLM's `SupportsHash`."""

    solver: FlowSolver
    compute_dtype: ComputeDtype
    """Type of the model's matrix products. vLLM's own dtype of the stage is float32 whatever this says."""
    is_fast: bool
    """Fused kernels and CUDA graphs."""
    max_num_windows: int
    """Most requests of one step."""
    max_num_codes: int
    """Most codec tokens of one step, over all its requests."""
    longest_window: int
    """Most codec tokens of one request; at most `max_num_codes`."""
    num_streams: int = 0
    """Streams whose state is kept from one window to the next; 0: every window is computed by itself."""
    progress: ProgressSpec | None = None
    """Where the worker reports while it starts; another socket each time."""
    has_low_gpu_priority: bool = False
    """Under NVIDIA's Multi-Process Service: kernels of other stages go first."""
    announces_to: tuple[str, ...] = ()
    """`StepThrottleSpec.socket` of each stage that hears of this one's batches; other sockets each time."""

    def max_num_blocks(self, codes_per_block: int) -> int:
        """The most blocks that one step can hold, where the last block of each request may be a part of
        one."""
        partial = self.max_num_windows * (codes_per_block - 1)
        blocks_of_one = -(-self.longest_window // codes_per_block)
        return min((self.max_num_codes + partial) // codes_per_block, self.max_num_windows * blocks_of_one)

    def compute_hash(self) -> str:
        """Called by `vllm.config.VllmConfig.compute_hash`."""
        lasting = msgspec.structs.replace(self, progress=None, has_low_gpu_priority=False, announces_to=())
        return hashlib.sha256(repr(lasting).encode()).hexdigest()
