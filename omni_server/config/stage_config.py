"""The stage config: which stages run where, and what flows between them.

Frozen pydantic models; unknown keys are errors. Everything that can be refused without looking at the
model folder or the machine is refused here, with a message that says what to change.
"""

from collections import defaultdict
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.frozen_model import FrozenModel
from omni_server.config.stages import ArStage, DiffusionStage, ModelStage, Stage

ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""`package.module:name`"""

MAX_MEMORY_FRACTION = 0.95
"""Sum of `gpu_memory_utilization` allowed on one device; the rest is CUDA contexts and fragmentation."""


class QueueConfig(FrozenModel):
    """How payloads travel over an edge."""

    transport: Literal["shared_memory", "inline"] = "shared_memory"
    """`shared_memory`: rows stay in /dev/shm and a reference travels. `inline`: they travel in the message; the edge
    into code2wav, which carries token ids only, must be so."""
    capacity: Annotated[int, Field(ge=1, le=4096)] = 16
    """Steps of the producer that may wait for the consumer; at the limit the producer's scheduler holds back."""


class Edge(FrozenModel):
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


class SupervisionConfig(FrozenModel):
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


class StageConfig(FrozenModel):
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
