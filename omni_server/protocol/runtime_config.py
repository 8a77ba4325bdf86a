"""What the server tells the classes that run inside a stage's engine, through vLLM's `additional_config`."""

import hashlib

import msgspec

from omni_server.protocol.start_report import ProgressSpec

_COMPILED = (
    "linear layers by omni_small_batch_linear, with plain parameters; attention by omni_attention_with_rope"
)
"""What the stages change in a model after it is made and before it is compiled. vLLM finds a compiled model
again by its configuration and its sources, and would find one from before such a change."""


class QueueSpec(msgspec.Struct, frozen=True):
    """One end of an edge. `path` is None for the inline transport."""

    capacity: int
    path: str | None
    slot_bytes: int
    max_portions: int
    """Requests that one step may carry."""
    num_consumers: int
    """Tensor-parallel ranks of the consuming stage; each copies the rows for itself."""


class StepThrottleSpec(msgspec.Struct, frozen=True):
    """How far apart a stage's steps begin while a decoder on the same GPU is busy."""

    socket: str
    """Where the stage hears of the decoder's batches; see `omni_server.protocol.local_socket`."""
    interval_per_stream_s: float
    """Seconds between the beginnings of two steps, per active stream."""
    max_streams: int
    """More streams than that make the interval no longer."""


class StageRuntimeConfig(msgspec.Struct, frozen=True):
    """Satisfies vLLM's `SupportsHash`: the hash covers the stage's role, and leaves out the queues'
    paths and the sockets, which are others at each start and must not invalidate the compile cache."""

    model_dir: str
    row_producer: str | None = None
    """`package.module:Class` of the edge's producer half, if this stage sends rows."""
    output_queue: QueueSpec | None = None
    input_queue: QueueSpec | None = None
    progress: ProgressSpec | None = None
    """Where the worker reports while it starts."""
    has_low_gpu_priority: bool = False
    """Under NVIDIA's Multi-Process Service: kernels of other stages go first."""
    decoding_kernels: bool = True
    """On a GPU, a decoding step's linear layers and attention run our kernels, not vLLM's."""
    step_throttle: StepThrottleSpec | None = None
    """None: the stage steps as fast as it can."""

    def compute_hash(self) -> str:
        """Called by `vllm.config.VllmConfig.compute_hash`."""
        return hashlib.sha256(
            repr((self.row_producer, self.decoding_kernels, _COMPILED)).encode()
        ).hexdigest()
