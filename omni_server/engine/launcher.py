"""Starts and stops the engines of a stage config."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from vllm import envs as vllm_envs
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers import BaseRenderer
from vllm.utils.torch_utils import OMP_NUM_THREADS_SET_BY_VLLM, startup_omp_num_threads

from omni_server.config.pipeline import MODEL_FAMILY_VARIABLE, Embeddings
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import ArStage, DiffusionStage
from omni_server.engine import fork_server
from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.async_engine import StageAsyncLLM
from omni_server.engine.cancellation import in_daemon_thread, uninterrupted
from omni_server.engine.construction import BuiltEngine, build_engine
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_args import ar_engine_args, diffusion_engine_args
from omni_server.engine.engine_handle import Stage
from omni_server.engine.environment import VISIBLE_DEVICES, compiles, only_devices
from omni_server.engine.mps import MpsDaemon, start_mps
from omni_server.engine.process_files import (
    TempFolder,
    check_cache_folder,
    check_descriptors,
    sweep_dead_folders,
)
from omni_server.engine.queue_layout import queue_layout
from omni_server.engine.start_progress import StartProgress
from omni_server.family import FamilyModel, ModelFamily
from omni_server.metrics.replica_name import replica_names
from omni_server.protocol.runtime_config import (
    PredictorSamplingSpec,
    QueueSpec,
    StageRuntimeConfig,
)
from omni_server.transport.block_ledger import BlockLedger
from omni_server.transport.slab_queue import SlabQueue, new_queue_path, sweep_dead_queues

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

AnyHandle = ArHandle | DiffusionHandle


@dataclass
class Engines:
    """Everything that runs; `stop` ends it."""

    ar: dict[str, Stage[ArHandle]] = field(default_factory=dict)
    diffusion: dict[str, Stage[DiffusionHandle]] = field(default_factory=dict)
    ledgers: dict[tuple[str, str], tuple[BlockLedger, ...]] = field(default_factory=dict)
    """Ledgers of the queues in shared memory, by source and target: one for each replica of the source."""
    mps: MpsDaemon | None = None
    temp: TempFolder | None = None

    def ar_handles(self) -> Iterator[ArHandle]:
        for stage in self.ar.values():
            yield from stage.handles

    def stages(self) -> Iterator[Stage[ArHandle] | Stage[DiffusionHandle]]:
        yield from self.ar.values()
        yield from self.diffusion.values()

    def handles(self) -> Iterator[AnyHandle]:
        for stage in self.stages():
            yield from stage.handles

    def num_active(self) -> dict[str, int]:
        return {handle.name: handle.num_active for handle in self.handles()}

    def pids(self) -> dict[str, int]:
        return {handle.name: pid for handle in self.handles() if (pid := handle.pid) is not None}

    async def stop(self) -> None:
        """Shuts down the engine processes and removes the queues, even if some engines have died."""
        if self.temp is not None:
            self.temp.announce_end()
        try:
            await asyncio.gather(*(handle.shutdown() for handle in self.handles()))
        finally:
            for ledgers in self.ledgers.values():
                for ledger in ledgers:
                    ledger.queue.close()
            self.ledgers.clear()
            if self.mps is not None:
                await asyncio.to_thread(self.mps.stop)
            if self.temp is not None:
                self.temp.remove()


async def start_engines(
    model_dir: Path,
    config: StageConfig,
    family: ModelFamily,
    model: FamilyModel,
    *,
    load_format: str,
    on_progress: Progress,
) -> Engines:
    """Starts all engines of `config` in parallel. `on_progress` gets a line for each step of each stage.

    Raises `ConfigError` if one does not start; nothing is left behind in that case.
    """
    for path in sweep_dead_queues() + sweep_dead_folders():
        logger.warning("removed %s, left by a server that was killed", path)
    check_cache_folder(Path(vllm_envs.VLLM_CACHE_ROOT), compiles=compiles(config))
    family.register()
    engines = Engines()
    try:
        queues = _make_queues(engines, config, model)
        engines.temp = TempFolder()
        engines.mps = start_mps(config, engines.temp.path)
        fork_server.start(family)
        builder = EngineBuilder(model_dir, config, family, queues, engines.temp, engines.mps, load_format)
        _add_stages(engines, config, builder)
        with StartProgress(on_progress) as progress:
            async with asyncio.TaskGroup() as group:
                for handle in engines.handles():
                    group.create_task(handle.start(progress))
    except BaseException as exc:
        await uninterrupted(engines.stop())
        if isinstance(exc, BaseExceptionGroup):
            raise exc.exceptions[0] from None
        raise
    return engines


def _add_stages(engines: Engines, config: StageConfig, builder: "EngineBuilder") -> None:
    """Adds the engines of all stages, which are not started yet."""
    for name, stage in config.stages.items():
        builds = {
            replica: partial(builder.build, name, number=number)
            for number, replica in enumerate(replica_names(name, stage.replicas))
        }
        if isinstance(stage, DiffusionStage):
            diffusion = [DiffusionHandle(replica, build) for replica, build in builds.items()]
            engines.diffusion[name] = Stage(name, diffusion)
            continue
        written = next((ledgers for (source, _), ledgers in engines.ledgers.items() if source == name), ())
        read = next((ledgers for (_, target), ledgers in engines.ledgers.items() if target == name), ())
        ar = [
            ArHandle(
                replica,
                build,
                output_ledger=written[number] if written else None,
                input_ledgers=read,
            )
            for number, (replica, build) in enumerate(builds.items())
        ]
        engines.ar[name] = Stage(name, ar)


def _make_queues(
    engines: Engines, config: StageConfig, model: FamilyModel
) -> dict[tuple[str, str], tuple[QueueSpec, ...]]:
    """Returns the queues of each edge with embeddings, for its two stages: one for each replica of the
    source, which all replicas of the target read."""
    specs = {}
    for edge in config.edges:
        if not isinstance(config.spec_of(edge).payload, Embeddings):
            continue
        key, layout = (edge.source, edge.target), queue_layout(config, edge, model)
        numbers = range(config.stages[edge.source].replicas)
        specs[key] = tuple(msgspec.structs.replace(layout, number=number) for number in numbers)
        if edge.queue.transport == "shared_memory":
            name = f"{edge.source}-{edge.target}"
            specs[key] = tuple(
                msgspec.structs.replace(spec, path=str(new_queue_path(name))) for spec in specs[key]
            )
            engines.ledgers[key] = ()
            for spec in specs[key]:  # one after the other: what exists is closed if the next one fails
                engines.ledgers[key] += (BlockLedger(SlabQueue(spec, create=True)),)
    return specs


@dataclass
class EngineBuilder:
    """Builds engines, at startup and again after one has died. The queues stay the same as long as the server
    lives."""

    model_dir: Path
    config: StageConfig
    family: ModelFamily
    queues: Mapping[tuple[str, str], tuple[QueueSpec, ...]]
    temp: TempFolder
    mps: MpsDaemon | None
    load_format: str

    def __post_init__(self) -> None:
        # On CPUs vLLM sets variables in this process whenever it creates an engine's config. All engines get
        # the same environment, including those of a restart.
        self._variables = dict(os.environ)
        self._renderers: dict[str, BaseRenderer[Any]] = {}

    async def build(self, name: str, progress: StartProgress, number: int = 0) -> BuiltEngine:
        """Builds the engine of the stage's replica with this number. Raises `ConfigError`."""
        stage = self.config.stages[name]
        replica = replica_names(name, stage.replicas)[number]
        arguments = self._arguments(name, stage, number)
        check_descriptors()
        await in_daemon_thread(self.temp.check_room)
        arguments.additional_config = msgspec.structs.replace(
            arguments.additional_config,
            progress=progress.began(replica),
            has_low_gpu_priority=stage.gpu_priority == "low",
        )
        built = await build_engine(
            replica,
            StageAsyncLLM,
            arguments,
            environment=self._environment(stage.devices_of(number)),
            folder=self.temp.path,
            timeout_s=self.config.start_timeout_s,
            progress=progress,
            renderer=self._renderers.get(replica),
        )
        self._renderers[replica] = built.client.renderer
        progress.is_ready(replica)
        return built

    def _arguments(self, name: str, stage: ArStage | DiffusionStage, number: int) -> AsyncEngineArgs:
        folder, spec = self.model_dir, self.config.stage_spec(name)
        if spec.folder is not None:
            # vLLM's caches do not depend on where the link is that leads to a checkpoint.
            folder = (folder / spec.folder).resolve()
        hf_overrides = self.family.hf_overrides(stage.model_stage)
        if isinstance(stage, DiffusionStage):
            return diffusion_engine_args(
                folder,
                stage,
                platform=self.config.platform,
                load_format=self.load_format,
                hf_overrides=hf_overrides,
                stepwise=spec.stepwise,
                carries_state=self.config.carries_state,
            )
        outgoing = self.config.edge_from(name, Embeddings)
        incoming = self.config.edge_into(name)
        speech = self.config.speech_edge
        received = None if incoming is None else self.config.spec_of(incoming).payload
        runtime = StageRuntimeConfig(
            model_dir=str(folder),
            row_producer=None if outgoing is None else self.config.spec_of(outgoing).function,
            output_queue=None if outgoing is None else self.queues[outgoing.source, outgoing.target][number],
            input_queues=self.queues[incoming.source, incoming.target]
            if incoming is not None and isinstance(received, Embeddings)
            else (),
            row_table=spec.reads_text or (isinstance(received, Embeddings) and received.text_ids),
            # Operators who want batch-invariant sums get them from vLLM's kernels.
            decoding_kernels=not vllm_envs.VLLM_BATCH_INVARIANT,
            num_predicted=0 if speech is None or speech.source != name else self.config.frames.num_predicted,
            predictor_sampling=PredictorSamplingSpec(**stage.predictor_sampling.model_dump()),
        )
        return ar_engine_args(
            folder,
            stage,
            runtime,
            platform=self.config.platform,
            load_format=self.load_format,
            hf_overrides=hf_overrides,
        )

    def _environment(self, devices: Sequence[int]) -> dict[str, str]:
        """Returns the environment of an engine's process: its devices, its share of the cores, and its folder
        for temporary files. Raises `ConfigError` if the operator has hidden one of `devices`."""
        variables = self._variables | self.temp.variables()
        variables[MODEL_FAMILY_VARIABLE] = self.config.model_family
        if self.mps is not None:
            variables |= self.mps.variables
        if self.config.platform == "cuda":
            variables[VISIBLE_DEVICES] = only_devices(devices, variables.get(VISIBLE_DEVICES))
        if "OMP_NUM_THREADS" not in self._variables:
            # An engine loads weights on its share of the cores and serves on one thread. vLLM does the same
            # where it starts the process, but counts the engines of one model only.
            variables["OMP_NUM_THREADS"] = str(startup_omp_num_threads(self.config.num_engines))
            variables[OMP_NUM_THREADS_SET_BY_VLLM] = "1"
        return variables
