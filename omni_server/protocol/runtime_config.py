"""Configuration of the classes inside a stage's engine, passed through vLLM's `additional_config`."""

import hashlib

import msgspec

from omni_server.protocol.start_report import ProgressSpec

_COMPILED = (
    "linear layers by omni_small_batch_linear, with plain parameters; attention by omni_attention_with_rope"
)
"""What the stages change in a model after it is created and before it is compiled. vLLM looks up a compiled
model by its configuration and its sources, and would find one from before such a change."""


class QueueSpec(msgspec.Struct, frozen=True):
    """The rows of one replica of an edge's producer. `path` is None for the inline transport."""

    capacity: int
    path: str | None
    slot_bytes: int
    max_portions: int
    """Requests that one step may carry."""
    num_consumers: int
    """Tensor-parallel ranks of a replica of the consuming stage; each copies the rows for itself."""
    number: int = 0
    """That of the producer's replica."""


class PredictorSamplingSpec(msgspec.Struct, frozen=True):
    """Settings in place of the model's own (`stages.runtime.code_sampling.CodeSampling`); None keeps one."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


class StageRuntimeConfig(msgspec.Struct, frozen=True):
    """Satisfies vLLM's `SupportsHash`. The hash covers the stage's role and omits the queues' paths and the
    sockets, which differ at each start and must not invalidate the compile cache."""

    model_dir: str
    row_producer: str | None = None
    """`package.module:Class` of the edge's producer half, if this stage sends rows."""
    output_queue: QueueSpec | None = None
    input_queues: tuple[QueueSpec, ...] = ()
    """One for each replica of the producer, by its number. Not empty if this stage receives rows."""
    row_table: bool = False
    """This stage looks up the rows of text tokens in a table that its model provides."""
    progress: ProgressSpec | None = None
    """Where the worker reports during startup."""
    has_low_gpu_priority: bool = False
    """Under NVIDIA's Multi-Process Service: kernels of other stages take precedence."""
    decoding_kernels: bool = True
    """On a GPU, the linear layers and attention of a decoding step run our kernels, not vLLM's, and so do the
    layers of a code predictor, not torch's."""
    num_predicted: int = 0
    """Codes that the model predicts for each sampled token (`TokenFrames.num_predicted`)."""
    predictor_sampling: PredictorSamplingSpec = PredictorSamplingSpec()
    """How these codes are sampled."""

    @property
    def is_fed(self) -> bool:
        """Whether rows arrive while requests run: from another stage, or of text."""
        return bool(self.input_queues) or self.row_table

    def compute_hash(self) -> str:
        """Called by `vllm.config.VllmConfig.compute_hash`."""
        return hashlib.sha256(
            repr((self.row_producer, self.decoding_kernels, _COMPILED)).encode()
        ).hexdigest()
