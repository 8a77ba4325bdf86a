"""The stages of a stage config: what runs where, and with which limits."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from omni_server.config.frozen_model import FrozenModel
from omni_server.protocol.diffusion_config import ComputeDtype

RESERVED_ENGINE_ARGS = frozenset(
    {
        "additional_config", "async_scheduling", "data_parallel_size", "device_ids", "disable_log_stats",
        "distributed_executor_backend", "enable_prompt_embeds", "generation_config",
        "gpu_memory_utilization", "hf_overrides", "load_format", "max_model_len",
        "max_num_batched_tokens", "max_num_seqs", "model", "pipeline_parallel_size", "revision",
        "runner", "scheduler_cls", "scheduling_policy", "skip_tokenizer_init", "tensor_parallel_size", "tokenizer",
        "trust_remote_code", "worker_cls",
    }
)  # fmt: skip
"""Engine arguments that have a field of their own, or that only the server sets."""


class SamplingDefaults(FrozenModel):
    """Sampling parameters of requests that do not set them. Unset fields keep vLLM's default."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 is greedy; higher values sample less likely tokens more often."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the most likely tokens whose probabilities add up to this."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Sample from this many of the most likely tokens; 0 is all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Exclude tokens whose probability is less than this fraction of the most likely token's."""
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Make tokens less likely if they are already in the prompt or the answer; 1 is no penalty."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Make tokens less likely if they are already in the answer."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Make tokens less likely for each time that they are already in the answer."""
    seed: int | None = None
    """Makes sampling reproducible."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest answer, if the prompt leaves enough room. For the stage that samples codec tokens, it limits
    the speech."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Shortest answer: stop tokens are not sampled before."""
    ignore_eos: bool | None = None
    """Continue to `max_tokens` even if the model ends its answer. For measurements."""


class PredictorSampling(FrozenModel):
    """How predicted codes are sampled, for requests whose sampled tokens are not greedy. Unset fields keep
    the model's own value."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 is greedy; higher values sample less likely codes more often."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Sample from this many of the most likely codes; 0 is all. More than 128, or all, is slower on a GPU."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the most likely of these codes whose probabilities add up to this."""


class CommonStage(FrozenModel):
    """The fields of every stage."""

    model_stage: str
    """Which of the family's stages runs here. If omitted, the family's stage with the same name."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Engines of the stage, which are identical and share its requests. Each has limits and a share of memory
    of its own."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """GPU indices, one for each tensor-parallel rank; with `replicas`, those of the first replica, then those
    of the second, and so on. Replicas share the devices if only those of one are given. With
    `CUDA_VISIBLE_DEVICES`, 0 is the first GPU in it. Ignored on CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of each device's total memory that the stage takes. Ignored on CPU."""
    gpu_priority: Literal["normal", "low"] = "normal"
    """Under `mps`, the kernels of a `low` stage wait for those of other stages on its GPU. Ignored on CPU."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 16
    """Maximum number of requests in one step."""
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 2048
    """Maximum tokens in one step; longer prompts are prefilled in chunks. For a decoder, codec tokens."""
    max_model_len: Annotated[int, Field(ge=1)]
    """Longest sequence in tokens, prompt and answer; for a decoder, the longest window in codec tokens."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is the dtype of the checkpoint; for a `diffusion` stage, the family's choice on cuda and float32
    on cpu."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, passed on unchanged."""

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together, in each replica."""
        return 1

    def devices_of(self, replica: int) -> tuple[int, ...]:
        """The devices of one replica, numbered from 0."""
        if len(self.devices) <= self.num_ranks or self.replicas == 1:
            return self.devices
        return self.devices[self.num_ranks * replica : self.num_ranks * (replica + 1)]

    def uses_of(self, device: int) -> int:
        """How many replicas run on the device."""
        return sum(device in self.devices_of(replica) for replica in range(self.replicas))

    @model_validator(mode="after")
    def _check_engine_args(self) -> "CommonStage":
        taken = sorted(RESERVED_ENGINE_ARGS & self.engine_args.keys())
        if taken:
            raise ValueError(
                f"engine_args may not set {', '.join(taken)}: a field of the stage or the server itself sets "
                "it"
            )
        if len(set(self.devices)) != len(self.devices):
            raise ValueError("devices names one device twice")
        ranks = self.num_ranks
        if self.replicas > 1 and len(self.devices) not in (1, ranks, ranks * self.replicas):
            each = "" if ranks == 1 else f" with {ranks} ranks each"
            raise ValueError(
                f"devices names {len(self.devices)} devices for {self.replicas} replicas{each}: name "
                f"{ranks * self.replicas}, or {ranks} that all replicas share"
            )
        return self


class ArStage(CommonStage):
    """A stage that samples tokens one after the other."""

    engine: Literal["ar"]
    """Autoregressive. If omitted, the engine that the family declares for `model_stage`."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that share each layer."""
    default_sampling: SamplingDefaults = SamplingDefaults()
    """Sampling parameters, used unless the request sets them."""
    predictor_sampling: PredictorSampling = PredictorSampling()
    """How the codes that the model adds to each sampled token are sampled. Only for a stage that predicts
    codes, such as Qwen3-Omni's talker."""

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together, in each replica."""
        return self.tensor_parallel_size

    @model_validator(mode="after")
    def _check_parallelism(self) -> "ArStage":
        ranks = self.num_ranks
        if self.replicas == 1 and ranks > 1 and len(self.devices) not in (1, ranks):
            raise ValueError(f"devices names {len(self.devices)} devices for {ranks} ranks")
        return self


class DiffusionStage(CommonStage):
    """A stage that computes a request, or one window of it, in one step.

    A family whose model has options extends this class (`StageSpec.config`).
    """

    gpu_dtype: ClassVar[ComputeDtype] = "float16"
    """What `dtype: auto` means on cuda. A family whose model may overflow in float16 overrides it."""

    engine: Literal["diffusion"]
    """Not autoregressive. If omitted, the engine that the family declares for `model_stage`."""
    max_streams: Annotated[int, Field(ge=1)] | None = None
    """Number of utterances whose state is kept between their windows if `chunks.carry` is set; `null`: twice
    `max_num_seqs`."""

    @property
    def num_stream_slots(self) -> int:
        """`max_streams`, or its default."""
        return 2 * self.max_num_seqs if self.max_streams is None else self.max_streams

    def compute_dtype(self, platform: Literal["cpu", "cuda"]) -> ComputeDtype:
        """`dtype`, or what `auto` means on the platform."""
        if self.dtype != "auto":
            return self.dtype
        return self.gpu_dtype if platform == "cuda" else "float32"

    @property
    def has_default_options(self) -> bool:
        """All fields that the family adds have their defaults."""
        return all(
            getattr(self, name) == field.get_default(call_default_factory=True)
            for name, field in type(self).model_fields.items()
            if name not in DiffusionStage.model_fields
        )

    @model_validator(mode="after")
    def _check_window(self) -> "DiffusionStage":
        if self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than the longest window "
                f"(max_model_len {self.max_model_len}), which is computed whole in one step: raise it"
            )
        if self.num_stream_slots < self.max_num_seqs:
            raise ValueError(
                f"max_streams is {self.max_streams}, less than the windows of one step (max_num_seqs "
                f"{self.max_num_seqs}), each of which may need a place: raise it"
            )
        return self


Stage = ArStage | DiffusionStage
