"""The pipeline that a model family declares: its stages, the edges between them, and its outputs.

A stage config deploys the whole pipeline or a part of it, under stage names of its own. The server itself
knows only what is declared here: which engine runs a stage, which payload an edge carries, which output a
stage ends in.
"""

import functools
import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import entry_points
from typing import Literal, Protocol, runtime_checkable

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.stages import DiffusionStage
from omni_server.types import Output

EngineKind = Literal["ar", "diffusion"]

ENTRY_POINT_GROUP = "omni_server.families"
"""The entry point group under which any installed package may declare its model families."""

MODEL_FAMILY_VARIABLE = "OMNI_SERVER_MODEL_FAMILY"
"""Environment variable of the engine processes: the `model_family` that is served."""


@dataclass(frozen=True)
class TokenFrames:
    """Codec tokens, int `[n, num_codebooks]`. The stage samples the tokens of one frame one after the other,
    or samples the first one and predicts the others from it in the same step.

    Raises `ValueError` if predicted codebooks do not leave exactly one for sampling.
    """

    num_codebooks: int = 1
    num_predicted: int = 0
    """The last codebooks of a frame, whose tokens the stage's model predicts
    (`stages.runtime.frame_predictor.FramePredictor`)."""

    def __post_init__(self) -> None:
        if self.num_codebooks < 1:
            raise ValueError(f"frames have at least one codebook, not {self.num_codebooks}")
        if self.num_predicted not in (0, self.num_codebooks - 1):
            raise ValueError(
                f"num_predicted is {self.num_predicted}, but the codes of a frame are predicted from one "
                f"sampled token: of {self.num_codebooks} codebooks, {self.num_codebooks - 1} or none"
            )

    @property
    def num_sampled(self) -> int:
        """Tokens that the stage samples for each frame."""
        return self.num_codebooks - self.num_predicted


@dataclass(frozen=True)
class Embeddings:
    """Hidden states by absolute position, `[n, width]`, which replace or add to the target's own embeddings.

    They travel through shared memory."""

    text_ids: bool = False
    """Text crosses the edge as token ids of the source, of which the target has rows
    (`stages.runtime.embeddings_in.HasRowTable`). Only positions of media have rows of the source."""


@dataclass(frozen=True)
class Text:
    """Text as the source writes it, which the target reads aloud (`StageSpec.reads_text`)."""


Payload = TokenFrames | Embeddings | Text


@dataclass(frozen=True)
class StepwiseEngine:
    """Runs a `diffusion` stage in many steps per request, with a worker of its own.

    Requests join and leave between two steps (`stages.runtime.step_scheduler`)."""

    worker: str
    """`package.module.Class`, a subclass of vLLM's `WorkerBase`."""
    config_format: str
    """vLLM's name of the parser of the checkpoint's configuration, which the family registers."""


@dataclass(frozen=True)
class StageSpec:
    engine: EngineKind
    output: Output | None = None
    """The output of this stage that the API sends; None if another stage consumes the result."""
    config: type[DiffusionStage] = DiffusionStage
    """`diffusion` only: the fields of this stage in a stage config. A family subclasses `DiffusionStage` to
    add options; its model finds them in `DiffusionRuntimeConfig.stage`. Their defaults are those of the
    family's reference implementation, if it has one."""
    stepwise: StepwiseEngine | None = None
    """`diffusion` only. None: a request is computed in one step, by a model of the family."""
    reads_text: bool = False
    """`ar` only, the entry or the target of `Text`: it samples codec tokens, and the server feeds it the text
    to speak as ids of rows (`omni_server.family.FamilyModel.speech_text`)."""
    folder: str | None = None
    """The folder of this stage's weights and config in that of the checkpoint; None: the checkpoint's own."""


@dataclass(frozen=True)
class EdgeSpec:
    """What flows from one stage to the next."""

    source: str
    target: str
    payload: Payload
    function: str
    """`package.module:Class`, the family's code for the edge. `Embeddings`: the producer's half, a
    `stages.runtime.row_producer.RowProducer`. `TokenFrames`: an `omni_server.family.codec.CodecEdgeFactory`.
    `Text`: an `omni_server.family.speech_text.SpokenTextFilterFactory`."""
    chunks: ChunkPlan | None = None
    """`TokenFrames` only: how they are cut into windows unless the stage config says otherwise. If it is an
    instance of a subclass, the stage config may set the fields of that subclass."""


_ENDS: dict[type[Payload], tuple[EngineKind, EngineKind]] = {
    TokenFrames: ("ar", "diffusion"),
    Embeddings: ("ar", "ar"),
    Text: ("ar", "ar"),
}


@dataclass(frozen=True)
class Pipeline:
    """All stages of a family, by name, and the edges between them.

    Raises `ValueError` unless the pipeline meets these conditions: It has one entry, and every other stage
    has one source, except the one that makes voices, which stands alone. Payloads fit the engines at both
    ends. An `ar` stage either writes text, which it may send, or embeddings, or sends frames. A diffusion
    stage ends in an output: audio from frames, or an image or a voice from its prompt. Each output comes from
    one stage."""

    stages: Mapping[str, StageSpec]
    edges: tuple[EdgeSpec, ...] = ()

    def __post_init__(self) -> None:
        for edge in self.edges:
            for end in (edge.source, edge.target):
                if end not in self.stages:
                    raise ValueError(f"edge {edge.source} -> {edge.target}: there is no stage '{end}'")
            self._check_payload(edge)
        if not self.stages:
            raise ValueError("a pipeline has at least one stage")
        if len(entries := self._entries()) != 1:
            raise ValueError(f"a pipeline has one entry, not {len(entries)}: {', '.join(entries)}")
        for name in self.stages:
            if (num_sources := sum(edge.target == name for edge in self.edges)) > 1:
                raise ValueError(f"stage '{name}' has {num_sources} sources")
        try:
            TopologicalSorter({edge.target: (edge.source,) for edge in self.edges}).prepare()
        except CycleError as error:
            raise ValueError(f"stages in a circle: {' -> '.join(error.args[1])}") from error
        for name in self.stages:
            self._check_stage(name)
        outputs = [stage.output for stage in self.stages.values() if stage.output is not None]
        if len(set(outputs)) != len(outputs):
            raise ValueError(f"outputs come from one stage each, not {', '.join(sorted(outputs))}")

    def _check_payload(self, edge: EdgeSpec) -> None:
        where, kind = f"edge {edge.source} -> {edge.target}", type(edge.payload)
        if kind not in _ENDS:
            raise ValueError(f"{where}: {edge.payload!r} is no payload")
        ends = self.stages[edge.source].engine, self.stages[edge.target].engine
        if ends != _ENDS[kind]:
            raise ValueError(
                f"{where}: {kind.__name__} flow from {' -> '.join(_ENDS[kind])}, not from {' -> '.join(ends)}"
            )

    def _check_stage(self, name: str) -> None:
        stage = self.stages[name]
        kinds = [type(edge.payload) for edge in self.edges_from(name)]
        if len(set(kinds)) != len(kinds):
            raise ValueError(f"stage '{name}' sends the same kind of payload to two stages")
        if stage.output is not None and (stage.output == "text") != (stage.engine == "ar"):
            raise ValueError(f"stage '{name}': {stage.engine} stages do not end in {stage.output}")
        if not kinds and stage.output is None:
            raise ValueError(f"stage '{name}' leads to no output")
        if stage.engine == "ar":
            fitting = {Embeddings, Text} if stage.output == "text" else {TokenFrames}
            if not fitting.issuperset(kinds):
                raise ValueError(
                    f"stage '{name}': a stage whose output is text sends text or embeddings, and no other stage "
                    "does"
                )
            into = self.edge_into(name)
            if into is not None and isinstance(into.payload, Text) != stage.reads_text:
                raise ValueError(f"stage '{name}': stages behind others read text if that is sent to them")
        elif (stage.output == "audio") != (self.edge_into(name) is not None):
            made_of = "the prompt" if stage.output == "audio" else "frames"
            raise ValueError(f"stage '{name}': {stage.output} is not made of {made_of}")

    def _path(self, stage: str) -> list[EdgeSpec]:
        """The edges from the entry to `stage`."""
        path: list[EdgeSpec] = []
        while (edge := self.edge_into(path[0].source if path else stage)) is not None:
            path.insert(0, edge)
        return path

    def _entries(self) -> list[str]:
        alone = [name for name in self.stages if self.edge_into(name) is None]
        return [name for name in alone if self.stages[name].output != "voice"]

    @property
    def entry(self) -> str:
        """The stage that gets the prompt."""
        return self._entries()[0]

    @property
    def outputs(self) -> frozenset[Output]:
        """What the stages can answer with."""
        return frozenset(stage.output for stage in self.stages.values() if stage.output is not None)

    def edge_into(self, stage: str) -> EdgeSpec | None:
        """None for the entry."""
        return next((edge for edge in self.edges if edge.target == stage), None)

    def edges_from(self, stage: str) -> tuple[EdgeSpec, ...]:
        """The edges to the stages that consume this stage's results."""
        return tuple(edge for edge in self.edges if edge.source == stage)

    def stages_for(self, outputs: Collection[Output]) -> tuple[str, ...]:
        """The stages that a request for `outputs` passes through, the entry first."""
        needed: list[str] = []
        for name, stage in self.stages.items():
            if stage.output not in outputs:
                continue
            path = [*(edge.source for edge in self._path(name)), name]
            needed += [stage for stage in path if stage not in needed]
        return tuple(needed)

    def part(self, stages: Collection[str]) -> "Pipeline":
        """The pipeline reduced to `stages`. Raises `ValueError` if the result is not a valid pipeline."""
        return Pipeline(
            {name: stage for name, stage in self.stages.items() if name in stages},
            tuple(edge for edge in self.edges if edge.source in stages and edge.target in stages),
        )


@runtime_checkable
class DeclaresPipeline(Protocol):
    """The part of `omni_server.family.ModelFamily` that the config needs."""

    pipeline: Pipeline


def installed_families() -> tuple[str, ...]:
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}))


@functools.cache
def find_family(name: str) -> DeclaresPipeline:
    """The family that a stage config names: an entry point of the group `omni_server.families`, or
    `package.module:object`.

    Raises `ValueError` if there is no such thing.
    """
    place = name
    if ":" not in name:
        places = sorted({point.value for point in entry_points(group=ENTRY_POINT_GROUP, name=name)})
        if not places:
            known = ", ".join(installed_families()) or "none"
            raise ValueError(f"no model family '{name}' is installed; installed are {known}")
        if len(places) > 1:
            raise ValueError(
                f"two packages declare a model family '{name}', {' and '.join(places)}: uninstall one of them"
            )
        (place,) = places
    family = imported(place)
    if not isinstance(family, DeclaresPipeline) or not isinstance(family.pipeline, Pipeline):
        raise ValueError(f"{place} declares no pipeline")
    return family


def imported(name: str) -> object:
    """What `package.module:attribute` names. Raises `ValueError` if there is no such thing."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        raise ValueError(f"cannot import {module_name} ({exc})") from exc
    except Exception as exc:  # whatever its code raises, it cannot be used
        raise ValueError(f"cannot import {module_name} ({type(exc).__name__}: {exc})") from exc
    if attribute not in vars(module):
        raise ValueError(f"{module_name} has no '{attribute}'")
    return vars(module)[attribute]
