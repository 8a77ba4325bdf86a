"""The stage config: which stages run where, and what flows between them.

Frozen pydantic models; unknown keys are errors. Everything that can be refused without looking at the
model folder or the machine is refused here, with a message that says what to change.
"""

import re
from collections import defaultdict
from collections.abc import Collection
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, SerializeAsAny, model_validator

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.frozen_model import Declared, FrozenModel, as_declared
from omni_server.config.pipeline import (
    EdgeSpec,
    Embeddings,
    Payload,
    Pipeline,
    StageSpec,
    Text,
    TokenFrames,
    find_family,
)
from omni_server.config.stages import ArStage, DiffusionStage, PredictorSampling, Stage
from omni_server.types import Output

StageName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]

AnyStage = Annotated[SerializeAsAny[Stage], Field(discriminator="engine")]
"""Includes the family's own fields if the family declares a class for the stage."""

Platform = Literal["cpu", "cuda"]


def _as_written(value: object) -> object:
    """YAML reads `on` and `off` as booleans."""
    return ("off", "on")[value] if isinstance(value, bool) else value


FAMILY_PATTERN = r"[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?"

MAX_MEMORY_FRACTION = 0.95
"""Sum of `gpu_memory_utilization` allowed on one device; the rest is CUDA contexts and fragmentation."""


_NOT_DETERMINED = "the stage's token ids do not determine its inputs"


class QueueConfig(FrozenModel):
    transport: Literal["shared_memory", "inline"] = "shared_memory"
    """`shared_memory`: embeddings stay in /dev/shm, and messages refer to them. `inline`: the message
    contains the payload; codec tokens always travel like this."""
    capacity: Annotated[int, Field(ge=1, le=4096)] = 16
    """Steps of the producer that may wait for the consumer; at the limit, backpressure applies."""


class Edge(FrozenModel):
    """What flows from one stage to the next."""

    source: Annotated[str, Field(alias="from")]
    """Name of the stage that sends."""
    target: Annotated[str, Field(alias="to")]
    """Name of the stage that receives."""
    queue: QueueConfig = QueueConfig()
    """How payloads travel."""
    chunks: Annotated[SerializeAsAny[ChunkPlan] | None, BeforeValidator(as_declared)] = None
    """How codec tokens are cut into windows; only on an edge with codec tokens. `null`: the family's plan."""

    model_config = ConfigDict(populate_by_name=True)


class SupervisionConfig(FrozenModel):
    """What happens when an engine dies or hangs."""

    hang_timeout_s: Annotated[float, Field(ge=1)] | None = 30.0
    """An engine that does not answer for this long is killed and restarted. An engine answers between two
    steps, so this must be longer than any step; `null`: no timeout."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts allowed per stage, or replica of a stage, within `restart_window_s`. If it dies once more, it
    has failed: the server ends with exit code 1 or, if other replicas of the stage have not failed, starts
    the replica again when the window allows it. 0: the first death is the last."""
    restart_window_s: Annotated[float, Field(gt=0)] = 600.0
    """Time after which a restart no longer counts towards `max_restarts`."""
    max_backoff_s: Annotated[float, Field(ge=0)] = 30.0
    """Longest wait before a restart. The first restart begins at once, the second after 0.5 s, and every
    further one after twice the previous wait."""


class StageConfig(FrozenModel):
    """A whole deployment: the file that `--stage-config` names."""

    model_family: Annotated[str, Field(pattern=f"^{FAMILY_PATTERN}$")]
    """The code of the model: an installed family, such as `qwen2_5_omni`, or `package.module:object`."""
    speech_model: str | None = None
    """Folder or hub id of the model that reads the answers of a language model aloud, for `spoken_llm`;
    `--speech-model` overrides it."""
    platform: Platform
    """Must match the installed build of vLLM."""
    mps: Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_written)] = "auto"
    """NVIDIA's Multi-Process Service, which lets the stages on one GPU run concurrently instead of in turns.
    `auto`: on if stages share a device and the driver includes the service. Ignored on CPU."""
    stages: dict[StageName, Annotated[AnyStage, BeforeValidator(as_declared)]]
    """The stages by name."""
    edges: tuple[Edge, ...] = ()
    """What flows between the stages. If omitted, the family's edges between these stages."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time that one engine may take to become ready."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Deadline of a request; `--request-timeout` overrides it."""
    supervision: SupervisionConfig = SupervisionConfig()
    """What happens when an engine dies or hangs."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: object) -> object:
        """Fill in what the file leaves out and the family knows."""
        if not isinstance(value, dict):
            return value
        family = value.get("model_family")
        if not isinstance(family, str) or not re.fullmatch(FAMILY_PATTERN, family):
            # Its field says what is wrong. What stages and edges may hold is not known.
            return value | {"stages": {}, "edges": ()}
        try:
            pipeline = find_family(family).pipeline
        except ValueError as error:
            raise ValueError(f"model_family '{family}': {error}") from error
        return _completed(value, family, pipeline)

    @property
    def pipeline(self) -> Pipeline:
        """The family's pipeline, reduced to the stages that are deployed."""
        return _deployed(self.model_family, frozenset(stage.model_stage for stage in self.stages.values()))

    @model_validator(mode="after")
    def _check_graph(self) -> "StageConfig":
        whole = find_family(self.model_family).pipeline
        roles = [stage.model_stage for stage in self.stages.values()]
        for name, stage in self.stages.items():
            spec = whole.stages.get(stage.model_stage)
            if spec is None:
                raise ValueError(f"stages.{name}: {self.model_family} has no {stage.model_stage}")
            if roles.count(stage.model_stage) > 1:
                raise ValueError(f"stages.{name}: another stage runs the {stage.model_stage}, too")
            if spec.engine != stage.engine:
                raise ValueError(f"stages.{name}.engine must be {spec.engine}, as {stage.model_stage} is")
            source = whole.edge_into(stage.model_stage)
            if source is not None and source.source not in roles:
                raise ValueError(
                    f"stages.{name} needs a stage that runs the {source.source} (model_stage: "
                    f"{source.source}): add it, or remove this one"
                )
            targets = [edge.target for edge in whole.edges_from(stage.model_stage)]
            if spec.output is None and not any(target in roles for target in targets):
                raise ValueError(
                    f"stages.{name} leads to no output without a stage that runs the {' or '.join(targets)}: "
                    "add it, or remove this one"
                )
        self._check_edges()
        self._check_predictor_sampling()
        return self

    def _check_predictor_sampling(self) -> None:
        speech = self.speech_edge
        predicting = speech.source if speech is not None and self.frames.num_predicted else None
        for name, stage in self.stages.items():
            if (
                name != predicting
                and isinstance(stage, ArStage)
                and stage.predictor_sampling != PredictorSampling()
            ):
                raise ValueError(
                    f"stages.{name}.predictor_sampling must go: the {stage.model_stage} of {self.model_family} "
                    "predicts no codes"
                )

    def _check_edges(self) -> None:
        for number, edge in enumerate(self.edges):
            for end, name in (("from", edge.source), ("to", edge.target)):
                if name not in self.stages:
                    raise ValueError(
                        f"edges[{number}].{end} is '{name}', which is no stage; stages are "
                        f"{', '.join(self.stages)}"
                    )
        found = [(self.stages[e.source].model_stage, self.stages[e.target].model_stage) for e in self.edges]
        expected = [(spec.source, spec.target) for spec in self.pipeline.edges]
        if sorted(found) != sorted(expected):
            wanted = ", ".join(f"{a} -> {b}" for a, b in expected) or "none"
            raise ValueError(
                f"edges must be: {wanted}; found: {', '.join(f'{a} -> {b}' for a, b in found) or 'none'}"
            )
        for number, edge in enumerate(self.edges):
            payload = self.spec_of(edge).payload
            if edge.chunks is not None and not isinstance(payload, TokenFrames):
                raise ValueError(f"edges[{number}]: remove 'chunks', only an edge with codec tokens has it")
            if isinstance(payload, Embeddings):
                for name in (edge.source, edge.target):
                    self._refuse_engine_arg(
                        name, "speculative_config", "rows of rejected draft tokens would reach the next stage"
                    )
                self._refuse_engine_arg(edge.target, "enable_prefix_caching", _NOT_DETERMINED)
            elif edge.queue.transport != "inline":
                raise ValueError(
                    f"edges[{number}].queue.transport must be inline from {edge.source} to {edge.target}: "
                    "only embeddings travel through shared memory"
                )
            elif isinstance(payload, TokenFrames) and payload.num_predicted:
                self._refuse_engine_arg(
                    edge.source,
                    "speculative_config",
                    "codes would be predicted for rejected draft tokens",
                )
                self._refuse_engine_arg(edge.source, "enable_prefix_caching", _NOT_DETERMINED)

    def _refuse_engine_arg(self, name: str, argument: str, reason: str) -> None:
        if self.stages[name].engine_args.get(argument):
            raise ValueError(f"stages.{name}.engine_args.{argument} is not supported: {reason}")

    @model_validator(mode="after")
    def _check_precision(self) -> "StageConfig":
        for name, stage in self.stages.items():
            if (
                self.platform == "cpu"
                and isinstance(stage, DiffusionStage)
                and stage.dtype not in ("auto", "float32")
            ):
                raise ValueError(
                    f"stages.{name}.dtype is {stage.dtype}; {stage.model_stage} computes in float32 on a "
                    "CPU: set it to float32 or auto"
                )
        return self

    def memory_shares(self) -> dict[int, float]:
        """The sum of the stages' shares on each device."""
        used: dict[int, float] = defaultdict(float)
        for stage in self.stages.values():
            for device in stage.devices:
                used[device] += stage.uses_of(device) * stage.gpu_memory_utilization
        return used

    @model_validator(mode="after")
    def _check_memory(self) -> "StageConfig":
        if self.platform != "cuda":
            return self
        for device, fraction in sorted(self.memory_shares().items()):
            if fraction > MAX_MEMORY_FRACTION + 1e-9:
                parts = [
                    f"{name} {stage.gpu_memory_utilization:g}"
                    for name, stage in self.stages.items()
                    for _ in range(stage.uses_of(device))
                ]
                raise ValueError(
                    f"gpu_memory_utilization on device {device} sums to {fraction:.2f} ({' + '.join(parts)}); "
                    f"at most {MAX_MEMORY_FRACTION} is possible: lower one or move a stage"
                )
        return self

    def spec_of(self, edge: Edge) -> EdgeSpec:
        """The family's declaration of an edge of this config."""
        ends = self.stages[edge.source].model_stage, self.stages[edge.target].model_stage
        return next(spec for spec in self.pipeline.edges if (spec.source, spec.target) == ends)

    def stage_spec(self, name: str) -> StageSpec:
        """The family's declaration of a stage of this config."""
        return self.pipeline.stages[self.stages[name].model_stage]

    def edge_into(self, name: str) -> Edge | None:
        """None for the entry, and for the stage that makes voices."""
        return next((edge for edge in self.edges if edge.target == name), None)

    def edge_from(self, name: str, payload: type[Payload]) -> Edge | None:
        """The edge over which the stage sends such a payload, if there is one."""
        edges = (edge for edge in self.edges if edge.source == name)
        return next((edge for edge in edges if isinstance(self.spec_of(edge).payload, payload)), None)

    @property
    def num_engines(self) -> int:
        """Replicas of all stages."""
        return sum(stage.replicas for stage in self.stages.values())

    @property
    def entry(self) -> str:
        """The stage that gets the prompt."""
        return next(name for name, stage in self.stages.items() if stage.model_stage == self.pipeline.entry)

    @property
    def reader(self) -> str | None:
        """The stage that reads text aloud (`StageSpec.reads_text`)."""
        return next((name for name in self.stages if self.stage_spec(name).reads_text), None)

    @property
    def speech_edge(self) -> Edge | None:
        """From the stage that samples codec tokens to their decoder."""
        edges = (self.edge_from(name, TokenFrames) for name in self.stages)
        return next((edge for edge in edges if edge is not None), None)

    @property
    def frames(self) -> TokenFrames:
        """The frames on `speech_edge`; without one, those of a single codebook."""
        payload = None if self.speech_edge is None else self.spec_of(self.speech_edge).payload
        return payload if isinstance(payload, TokenFrames) else TokenFrames()

    def stages_for(self, outputs: Collection[Output]) -> tuple[str, ...]:
        """Names of the stages that a request for `outputs` passes through, the entry first."""
        needed = self.pipeline.stages_for(outputs)
        return tuple(
            name for role in needed for name, stage in self.stages.items() if stage.model_stage == role
        )

    def reduced_to(self, outputs: Collection[Output]) -> "StageConfig":
        """Without the stages that only other outputs need."""
        if self.outputs <= set(outputs):
            return self
        stages = self.stages_for(outputs)
        document = self.model_dump(by_alias=True)
        document["stages"] = {name: stage for name, stage in document["stages"].items() if name in stages}
        document["edges"] = [
            edge for edge in document["edges"] if edge["from"] in stages and edge["to"] in stages
        ]
        return StageConfig.model_validate(document)

    @property
    def outputs(self) -> frozenset[Output]:
        """What the deployment can answer with."""
        return self.pipeline.outputs

    @property
    def carries_state(self) -> bool:
        """The decoder of codec tokens keeps state between the windows of an utterance."""
        return any(edge.chunks is not None and edge.chunks.carries_state for edge in self.edges)


@cache  # each request asks for it
def _deployed(family: str, stages: frozenset[str]) -> Pipeline:
    return find_family(family).pipeline.part(stages)


def _completed(document: dict[str, Any], family: str, pipeline: Pipeline) -> dict[str, Any]:
    """The document with the family's `model_stage`, `engine`, `edges`, `queue` and `chunks`
    wherever it has none of its own. Raises `ValueError` for a stage whose part of the model is unknown."""
    stages = document.get("stages")
    if not isinstance(stages, dict):
        return document
    completed: dict[Any, Any] = {}
    names: dict[Any, Any] = {}  # by role
    for name, stage in stages.items():
        if isinstance(stage, dict):
            role = stage.get("model_stage", name)
            spec = pipeline.stages.get(role) if isinstance(role, str) else None
            if spec is None and isinstance(role, str):
                raise ValueError(
                    f"stages.{name}.model_stage is '{role}'; the stages of {family} are "
                    f"{', '.join(pipeline.stages)}"
                )
            stage = {"model_stage": role} | ({} if spec is None else {"engine": spec.engine}) | stage
            if spec is not None:
                names[role] = name
                if spec.engine == stage["engine"] == "diffusion":
                    stage = Declared(spec.config, stage)
        completed[name] = stage
    edges = document.get("edges")
    if edges is None:
        ends = [(spec.source, spec.target) for spec in pipeline.edges]
        edges = [{"from": names[a], "to": names[b]} for a, b in ends if a in names and b in names]
    if isinstance(edges, list | tuple):
        roles: dict[Any, str] = {name: role for role, name in names.items()}
        edges = [_completed_edge(edge, roles, pipeline) if isinstance(edge, dict) else edge for edge in edges]
    return document | {"stages": completed, "edges": edges}


def _completed_edge(edge: dict[str, Any], roles: dict[Any, str], pipeline: Pipeline) -> dict[str, Any]:
    source, target = edge.get("from", edge.get("source")), edge.get("to", edge.get("target"))
    if not isinstance(source, str) or not isinstance(target, str):
        return edge
    ends = roles.get(source), roles.get(target)
    spec = next((spec for spec in pipeline.edges if (spec.source, spec.target) == ends), None)
    if spec is None:
        return edge
    if isinstance(spec.payload, Embeddings):
        return edge
    edge = {"queue": {"transport": "inline"}} | edge
    if isinstance(spec.payload, Text):
        return edge
    plan, chunks = spec.chunks or ChunkPlan(), edge.get("chunks")
    if chunks is None:
        chunks = plan
    elif isinstance(chunks, dict):
        of_family = {name: getattr(plan, name) for name in plan.model_fields_set}
        chunks = Declared(type(plan), of_family | chunks)
    return edge | {"chunks": chunks}
