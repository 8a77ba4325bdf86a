"""The stage config: which stages run where, and what flows between them.

Frozen pydantic models; unknown keys are errors. Everything that can be refused without looking at the
model folder or the machine is refused here, with a message that says what to change.
"""

from collections import defaultdict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

ModelStage = Literal["thinker", "talker", "code2wav"]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""`package.module:name`"""

MAX_MEMORY_FRACTION = 0.95
"""Sum of `gpu_memory_utilization` allowed on one device; the rest is CUDA contexts and fragmentation."""

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
"""Engine arguments that a field of their own sets, or that the server owns."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SamplingDefaults(_Model):
    """Sampling of an autoregressive stage where the request says nothing. Unset fields keep vLLM's default."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 is greedy; higher draws less likely tokens more often."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Draws from the most likely tokens that together have this probability."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Draws from this many of the most likely tokens; 0 is all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Leaves out tokens less likely than this share of the most likely one."""
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Makes tokens less likely that the prompt or the answer has already; 1 is none."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Makes tokens less likely that the answer has already."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """The same, for each time that the answer has them."""
    seed: int | None = None
    """Makes what is drawn repeatable."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longest answer. On the talker it bounds the speech: 50 codec tokens are one second."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """Shortest answer: tokens that end it are barred before."""
    ignore_eos: bool | None = None
    """Goes on to `max_tokens`, whatever the model would do. For measurements."""


class CommonStage(_Model):
    """What every stage has."""

    model_stage: ModelStage
    """The part of the checkpoint that runs here."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """GPU indices, one for each tensor-parallel rank. Ignored on CPU."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of each device's total memory that the stage takes. Ignored on CPU."""
    gpu_priority: Literal["normal", "low"] = "normal"
    """A `low` stage lets others on its GPU go first: under `mps` its kernels wait for theirs, and an autoregressive one
    pauses while code2wav computes the first window of an utterance. Ignored on CPU."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 16
    """Requests that run in one step."""
    max_num_batched_tokens: Annotated[int, Field(ge=1)] = 2048
    """Tokens that run in one step; longer prompts are prefilled in chunks. For code2wav codec tokens."""
    max_model_len: Annotated[int, Field(ge=1)]
    """Longest sequence in tokens, prompt and answer; for code2wav the longest window, in codec tokens."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto` is the checkpoint's own; for code2wav float16 on cuda and float32 on cpu."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, handed on as they are."""

    @model_validator(mode="after")
    def _check_engine_args(self) -> "CommonStage":
        taken = sorted(RESERVED_ENGINE_ARGS & self.engine_args.keys())
        if taken:
            raise ValueError(
                f"engine_args may not set {', '.join(taken)}: a field of the stage or the server itself sets it"
            )
        if len(set(self.devices)) != len(self.devices):
            raise ValueError("devices names one device twice")
        return self


class ArStage(CommonStage):
    """An autoregressive engine: thinker or talker."""

    engine: Literal["ar"]
    """Autoregressive: for thinker and talker."""
    model_stage: Literal["thinker", "talker"]
    """The part of the checkpoint that runs here."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that share each layer."""
    pipeline_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that take turns. Must be 1 where hidden states leave or enter, which is every stage with an edge."""
    default_sampling: SamplingDefaults = SamplingDefaults()
    """Sampling where a request says nothing."""
    busy_step_interval_ms: Annotated[float, Field(ge=0, le=100)] = 0
    """Shortest time from step to step while a code2wav on the same GPU has more to do than fits into its step. Ignored
    on CPU."""

    @model_validator(mode="after")
    def _check_parallelism(self) -> "ArStage":
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size
        if ranks > 1 and len(self.devices) not in (1, ranks):
            raise ValueError(f"devices names {len(self.devices)} devices for {ranks} ranks")
        return self


class SolverConfig(_Model):
    """Flow-matching solver of the DiT (`Qwen2_5OmniToken2WavDiTModel.sample`); the defaults are the reference's."""

    num_steps: Annotated[int, Field(ge=2, le=100)] = 10
    """Points of the time grid, one Runge-Kutta step fewer; more is slower and more exact."""
    guidance_scale: Annotated[float, Field(ge=0)] = 0.5
    """Strength of classifier-free guidance."""
    sway_coefficient: float = -1.0
    """Where the grid is denser; negative is at the beginning."""


class DiffusionStage(CommonStage):
    """A non-autoregressive engine: code2wav."""

    engine: Literal["diffusion"]
    """Not autoregressive: for code2wav."""
    model_stage: Literal["code2wav"]
    """The part of the checkpoint that runs here."""
    solver: SolverConfig = SolverConfig()
    """How code2wav's flow-matching equation is solved."""
    max_streams: Annotated[int, Field(ge=1)] | None = None
    """Utterances whose state is kept between their windows, where `chunks.carry` is set; `null`: twice
    `max_num_seqs`."""

    @property
    def num_stream_slots(self) -> int:
        """`max_streams`, or what stands for it."""
        return 2 * self.max_num_seqs if self.max_streams is None else self.max_streams

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


class QueueConfig(_Model):
    """How payloads travel over an edge."""

    transport: Literal["shared_memory", "inline"] = "shared_memory"
    """`shared_memory`: rows stay in /dev/shm and a reference travels. `inline`: they travel in the message; the edge
    into code2wav, which carries token ids only, must be so."""
    capacity: Annotated[int, Field(ge=1, le=4096)] = 16
    """Steps of the producer that may wait for the consumer; at the limit the producer's scheduler holds back."""


class PacingConfig(_Model):
    """When windows are sent to code2wav and when the sound leaves. Seconds are seconds of audio."""

    max_work_ahead_s: Annotated[float, Field(ge=0)] | None = 4.0
    """A stream that has sent more seconds of audio than this ahead of its listener waits; `null`: never."""
    max_outstanding_windows: Annotated[int, Field(ge=1, le=64)] | None = None
    """Windows of one stream that may be in code2wav at once; `null`: 1 with `carry`, which allows no more, else 2."""
    max_start_delay_s: Annotated[float, Field(ge=0, le=10)] = 2.0
    """Longest time that a stream's first audio is held back so that playback does not stall under load; 0: never."""


def _as_ramp(value: object) -> object:
    """A single number is a ramp of one."""
    if value in ([], ()):
        raise ValueError("must hold at least one number")  # as a length of the tuple it would follow every other error
    return (value,) if isinstance(value, int) else value


Ramp = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_as_ramp)]


class BusyChunks(_Model):
    """Other windows for utterances that begin while many others are under way.

    Small first windows give early first audio where code2wav has time; where it has not, they only make more work, and
    first audio would have to wait for it."""

    min_streams: Annotated[int, Field(ge=2)]
    """So many requests for speech under way at once, also those that have not begun to speak, are many."""
    new_blocks: Ramp
    """As in `chunks`."""


class ChunkPlan(_Model):
    """How codec tokens are cut into windows for code2wav; a block is the DiT's attention block (12 codes)."""

    mode: Literal["windows", "whole"] = "windows"
    """`windows`: as soon as there is enough for one. `whole`: one pass when the talker has finished, which is the
    reference's result, without streaming."""
    carry: bool = True
    """A window begins where the one before it ended, with what that one kept; otherwise, and where nothing was kept, it
    computes `past_blocks` again. Without effect in mode `whole`."""
    past_blocks: Annotated[int, Field(ge=0)] = 2
    """Blocks before the new ones that a window computes again where nothing is kept."""
    new_blocks: Ramp = (1, 1, 2, 4, 8)
    """New blocks of the first window, of the second and so on; the last number holds for all that follow. A single
    number is a ramp of one."""
    busy: BusyChunks | None = None
    """Other windows where many speak at once; `null`: the same always. Without effect in mode `whole`."""
    future_blocks: Annotated[int, Field(ge=0)] = 1
    """Blocks after the new ones that a window waits for."""
    vocoder_margin_frames: Annotated[int, Field(ge=0)] = 20
    """Mel frames of context that the vocoder gets on each side of what is emitted; 28 is its full field."""
    pacing: PacingConfig = PacingConfig()
    """When windows are sent and when the sound leaves."""

    @model_validator(mode="before")
    @classmethod
    def _check_gone(cls, value: object) -> object:
        if isinstance(value, dict) and "first_new_blocks" in value:
            raise ValueError(
                "first_new_blocks is now the first number of new_blocks: write new_blocks: [1, 2] for one new block "
                "in the first window and two in every later one"
            )
        return value

    @model_validator(mode="after")
    def _check_outstanding(self) -> "ChunkPlan":
        if self.carries_state and self.max_outstanding_windows > 1:
            raise ValueError(
                f"pacing.max_outstanding_windows is {self.max_outstanding_windows}, but with carry each window needs "
                "what the one before it leaves behind: set it to 1, or carry to false"
            )
        return self

    @property
    def carries_state(self) -> bool:
        """Windows are parts of a stream, computed one after the other."""
        return self.mode == "windows" and self.carry

    @property
    def max_outstanding_windows(self) -> int:
        """The pacing's, or what stands for it."""
        limit = self.pacing.max_outstanding_windows
        if limit is not None:
            return limit
        return 1 if self.carries_state else 2

    @property
    def longest_window_blocks(self) -> int | None:
        """Blocks of the longest window that this plan can cut; None in mode `whole`, where it is the utterance."""
        if self.mode == "whole":
            return None
        ramps = self.new_blocks if self.busy is None else self.new_blocks + self.busy.new_blocks
        return self.past_blocks + max(ramps) + self.future_blocks


class Edge(_Model):
    """What flows from one stage to the next."""

    source: Annotated[str, Field(alias="from")]
    """Name of the stage that sends."""
    target: Annotated[str, Field(alias="to")]
    """Name of the stage that receives."""
    function: ImportPath
    """The model family's code for this edge."""
    queue: QueueConfig = QueueConfig()
    """How payloads travel."""
    chunks: ChunkPlan | None = None
    """How codec tokens are cut into windows. Only on the edge into code2wav, and required there."""

    model_config = ConfigDict(populate_by_name=True)


Stage = Annotated[ArStage | DiffusionStage, Field(discriminator="engine")]


class SupervisionConfig(_Model):
    """What happens when an engine dies or hangs."""

    hang_timeout_s: Annotated[float, Field(ge=1)] | None = 30.0
    """An engine that does not answer for this long is killed and started again. It answers between two steps, so this
    must be longer than any step; `null`: it may take any time."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """A stage that dies once more often than this within `restart_window_s` ends the server with exit code 1; 0: the
    first death does."""
    restart_window_s: Annotated[float, Field(gt=0)] = 600.0
    """Restarts are forgotten after this time."""
    max_backoff_s: Annotated[float, Field(ge=0)] = 30.0
    """The first restart begins at once, the second after 0.5 s, each further one after twice as long, up to this."""


class StageConfig(_Model):
    """A whole deployment: the file that `--stage-config` names."""

    model_family: ImportPath
    """The code that knows the model: `stages.qwen2_5_omni:FAMILY`."""
    platform: Literal["cpu", "cuda"]
    """Must match the installed build of vLLM."""
    mps: Literal["auto", "on", "off"] = "auto"
    """NVIDIA's Multi-Process Service, which lets stages on one GPU run side by side instead of in turns. `auto`: where
    stages share a device and the driver brings the service. Ignored on CPU."""
    stages: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], Stage]
    """The stages by name."""
    edges: tuple[Edge, ...] = ()
    """What flows between them."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest wait for one engine to be ready."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline of a request; `--request-timeout` overrides it."""
    supervision: SupervisionConfig = SupervisionConfig()
    """What happens when an engine dies or hangs."""

    @model_validator(mode="after")
    def _check_graph(self) -> "StageConfig":
        roles = [stage.model_stage for stage in self.stages.values()]
        for role in set(roles):
            if roles.count(role) > 1:
                raise ValueError(f"two stages run the {role}")
        if "thinker" not in roles:
            raise ValueError("no stage runs the thinker (model_stage: thinker)")
        if ("talker" in roles) != ("code2wav" in roles):
            raise ValueError("talker and code2wav only work together: add the missing stage or remove both")
        for number, edge in enumerate(self.edges):
            for end, name in (("from", edge.source), ("to", edge.target)):
                if name not in self.stages:
                    raise ValueError(
                        f"edges[{number}].{end} is '{name}', which is no stage; stages are {', '.join(self.stages)}"
                    )
        found = [(self.stages[e.source].model_stage, self.stages[e.target].model_stage) for e in self.edges]
        expected = [("thinker", "talker"), ("talker", "code2wav")] if "talker" in roles else []
        if sorted(found) != sorted(expected):
            wanted = ", ".join(f"{a} -> {b}" for a, b in expected) or "none"
            raise ValueError(f"edges must be: {wanted}; found: {', '.join(f'{a} -> {b}' for a, b in found) or 'none'}")
        for number, edge in enumerate(self.edges):
            into_code2wav = self.stages[edge.target].model_stage == "code2wav"
            if into_code2wav != (edge.chunks is not None):
                hint = "add 'chunks'" if into_code2wav else "remove 'chunks', only the edge into code2wav has it"
                raise ValueError(f"edges[{number}]: {hint}")
            if into_code2wav:
                self._check_chunks(edge)
        return self

    def _check_chunks(self, edge: Edge) -> None:
        if edge.queue.transport != "inline":
            raise ValueError(
                f"edge {edge.source} -> {edge.target}: set queue.transport to inline; codec tokens are ids and "
                "travel inside the message (a window is smaller than the reference to a slot would be)"
            )

    @model_validator(mode="after")
    def _check_rows(self) -> "StageConfig":
        for edge in self.edges:
            for name in (edge.source, edge.target):
                stage = self.stages[name]
                if not isinstance(stage, ArStage):
                    continue
                if stage.pipeline_parallel_size > 1:
                    raise ValueError(
                        f"stages.{name}.pipeline_parallel_size must be 1: rows of hidden states cannot leave or "
                        "enter a pipeline-parallel stage; use tensor_parallel_size"
                    )
                if stage.engine_args.get("speculative_config") is not None:
                    raise ValueError(
                        f"stages.{name}.engine_args.speculative_config must go: rows of rejected draft tokens "
                        "would reach the next stage"
                    )
            talker = self.stages[edge.target]
            if isinstance(talker, ArStage) and talker.engine_args.get("enable_prefix_caching"):
                raise ValueError(
                    f"stages.{edge.target}.engine_args.enable_prefix_caching must be off: the talker's token ids do "
                    "not determine its inputs"
                )
        return self

    @model_validator(mode="after")
    def _check_precision(self) -> "StageConfig":
        for name, stage in self.stages.items():
            if self.platform == "cpu" and isinstance(stage, DiffusionStage) and stage.dtype not in ("auto", "float32"):
                raise ValueError(
                    f"stages.{name}.dtype is {stage.dtype}; {stage.model_stage} computes in float32 on a CPU: "
                    "set it to float32 or auto"
                )
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> "StageConfig":
        if self.platform != "cuda":
            return self
        used: dict[int, float] = defaultdict(float)
        for stage in self.stages.values():
            for device in stage.devices:
                used[device] += stage.gpu_memory_utilization
        for device, fraction in sorted(used.items()):
            if fraction > MAX_MEMORY_FRACTION + 1e-9:
                names = [n for n, s in self.stages.items() if device in s.devices]
                raise ValueError(
                    f"gpu_memory_utilization on device {device} sums to {fraction:.2f} "
                    f"({' + '.join(f'{n} {self.stages[n].gpu_memory_utilization:g}' for n in names)}); "
                    f"at most {MAX_MEMORY_FRACTION} is possible: lower one or move a stage"
                )
        return self

    @property
    def carries_state(self) -> bool:
        """code2wav keeps state between the windows of an utterance."""
        return any(edge.chunks is not None and edge.chunks.carries_state for edge in self.edges)

    def stage_named(self, model_stage: ModelStage) -> str | None:
        """Name of the stage that runs `model_stage`, or None if the deployment has none."""
        return next((name for name, stage in self.stages.items() if stage.model_stage == model_stage), None)
