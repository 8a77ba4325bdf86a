"""Starts the engines of a stage config, and stops them."""

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from vllm import envs as vllm_envs
from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.config.stage_config import ArStage, DiffusionStage, Edge, StageConfig
from omni_server.engine.ar_args import ar_engine_args
from omni_server.engine.ar_client import ArStageClient
from omni_server.engine.async_engine import StageAsyncLLM
from omni_server.engine.diffusion_args import diffusion_engine_args
from omni_server.engine.diffusion_client import DiffusionStageClient
from omni_server.engine.give_way import give_way_specs
from omni_server.engine.mps import MpsDaemon, start_mps
from omni_server.engine.progress import StartProgress
from omni_server.engine.queue_layout import queue_layout
from omni_server.engine.startup_threads import shared_startup_threads
from omni_server.errors import ConfigError
from omni_server.family import FamilyModel, ModelFamily
from omni_server.protocol.give_way import GiveWaySpec
from omni_server.protocol.rows import SharedBlock
from omni_server.protocol.runtime_config import QueueSpec, StageRuntimeConfig
from omni_server.transport.slab_queue import SlabQueue, new_queue_path, sweep_dead_queues

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

GIVE_UP_TIMEOUT_S = 30.0
"""Longest wait for a constructor to notice that its engine process is gone."""


@dataclass
class Engines:
    """Everything that runs; `stop` ends it."""

    ar: dict[str, ArStageClient] = field(default_factory=dict)
    diffusion: dict[str, DiffusionStageClient] = field(default_factory=dict)
    queues: dict[tuple[str, str], SlabQueue] = field(default_factory=dict)
    mps: MpsDaemon | None = None

    def _clients(self) -> Iterator[ArStageClient | DiffusionStageClient]:
        yield from self.ar.values()
        yield from self.diffusion.values()

    def drop_block(self, block: SharedBlock) -> None:
        """End a reference that nobody will follow any more. There is one edge that carries rows."""
        (queue,) = self.queues.values()
        queue.finish_all(block)

    def num_active(self) -> dict[str, int]:
        """Requests that each stage has not finished."""
        return {client.name: client.num_active for client in self._clients()}

    def pids(self) -> dict[str, int]:
        """Process id of each stage's engine."""
        return {client.name: client.pid for client in self._clients()}

    async def stop(self) -> None:
        """Shut the engine processes down and remove the queues, also where some have died."""
        try:
            await asyncio.gather(*(client.shutdown() for client in self._clients()))
        finally:
            for queue in self.queues.values():
                queue.close()
            self.queues.clear()
            if self.mps is not None:
                await asyncio.to_thread(self.mps.stop)


async def start_engines(
    model_dir: Path,
    config: StageConfig,
    family: ModelFamily,
    model: FamilyModel,
    *,
    load_format: str,
    on_progress: Progress,
) -> Engines:
    """All engines of `config`, ready; they start side by side. `on_progress` gets a line for each step of each stage.

    Raises `ConfigError` if one does not come up; nothing is left behind then.
    """
    for path in sweep_dead_queues():
        logger.warning("removed %s, left by a server that was killed", path)
    family.register()
    engines = Engines()
    others = set(multiprocessing.active_children())
    try:
        for edge in config.edges:
            if edge.queue.transport == "shared_memory":
                engines.queues[edge.source, edge.target] = _make_queue(config, edge, model)
        engines.mps = start_mps(config)
        with (
            StartProgress(on_progress) as progress,
            shared_startup_threads(len(config.stages)),
            engines.mps.for_children() if engines.mps is not None else contextlib.nullcontext(),
        ):
            ways = give_way_specs(config)
            start = functools.partial(_start_stage, model_dir, config, family, engines, ways, load_format, progress)
            async with asyncio.TaskGroup() as group:
                for name in config.stages:
                    group.create_task(start(name))
    except BaseException as exc:
        await engines.stop()
        for child in set(multiprocessing.active_children()) - others:  # a constructor that failed may leave its own
            child.kill()
            await asyncio.to_thread(child.join, GIVE_UP_TIMEOUT_S)
        if isinstance(exc, BaseExceptionGroup):
            raise exc.exceptions[0] from None
        raise
    return engines


async def _start_stage(
    model_dir: Path,
    config: StageConfig,
    family: ModelFamily,
    engines: Engines,
    ways: Mapping[str, GiveWaySpec],
    load_format: str,
    progress: StartProgress,
    name: str,
) -> None:
    stage = config.stages[name]
    overrides = family.hf_overrides(stage.model_stage)
    watched = progress.began(name)
    match stage:
        case ArStage():
            engine_class: type[AsyncLLM] = StageAsyncLLM
            arguments = ar_engine_args(
                model_dir,
                stage,
                _runtime_config(model_dir, config, name, engines, gives_way=ways.get(name)),
                platform=config.platform,
                load_format=load_format,
                hf_overrides=overrides,
            )
        case DiffusionStage():
            assert overrides is not None
            engine_class = AsyncLLM
            arguments = diffusion_engine_args(
                model_dir,
                stage,
                platform=config.platform,
                load_format=load_format,
                hf_overrides=overrides,
                carries_state=config.carries_state,
                announces_to=tuple(ways.values()),
            )
    arguments.additional_config = msgspec.structs.replace(
        arguments.additional_config, progress=watched, has_low_gpu_priority=stage.gpu_priority == "low"
    )
    build = functools.partial(engine_class.from_engine_args, arguments)
    engine = await _built(name, build, config.start_timeout_s, engines, progress)
    if isinstance(engine, StageAsyncLLM):
        edge = next((e for e in config.edges if e.source == name), None)
        if edge is not None:
            engine.row_queue = engines.queues.get((edge.source, edge.target))
        engines.ar[name] = ArStageClient(name, engine)
    else:
        engines.diffusion[name] = DiffusionStageClient(name, engine)
    progress.is_ready(name)


async def _built(
    name: str, build: Callable[[], AsyncLLM], timeout_s: float, engines: Engines, progress: StartProgress
) -> AsyncLLM:
    """The constructor blocks until the engine is up, so it runs in a thread.

    A thread cannot be stopped; where the engine is no longer wanted its process is killed, which lets the
    constructor fail.
    """
    task = asyncio.create_task(asyncio.to_thread(build))
    try:
        return await asyncio.wait_for(asyncio.shield(task), timeout_s)
    except TimeoutError:
        await _give_up(task, engines)
        reached = progress.last_phase(name) or "starting its process"
        raise ConfigError(
            f"stage '{name}' was not ready after {timeout_s:g} s (start_timeout_s); it had come to: {reached}"
        ) from None
    except asyncio.CancelledError:  # the server is being stopped, or another stage failed
        await _give_up(task, engines)
        raise
    except Exception as exc:
        raise ConfigError(f"stage '{name}' did not start: {exc}") from exc


async def _give_up(building: asyncio.Task[AsyncLLM], engines: Engines) -> None:
    """End engines that are still being built; those in `engines` are ended by `Engines.stop`."""
    wanted = set(engines.pids().values())
    deadline = time.monotonic() + GIVE_UP_TIMEOUT_S
    while not building.done() and time.monotonic() < deadline:
        for child in multiprocessing.active_children():
            if child.pid not in wanted:
                child.kill()
        await asyncio.wait([building], timeout=0.2)  # it may just be about to spawn the process
    if building.done() and not building.cancelled() and building.exception() is None:
        await asyncio.to_thread(building.result().shutdown)  # it came up at the last moment


def _runtime_config(
    model_dir: Path, config: StageConfig, name: str, engines: Engines, *, gives_way: GiveWaySpec | None
) -> StageRuntimeConfig:
    outgoing = next((e for e in config.edges if e.source == name and e.chunks is None), None)
    incoming = next((e for e in config.edges if e.target == name), None)
    return StageRuntimeConfig(
        model_dir=str(model_dir),
        row_producer=None if outgoing is None else outgoing.function,
        output_queue=None if outgoing is None else _queue_spec(config, outgoing, engines),
        input_queue=None if incoming is None else _queue_spec(config, incoming, engines),
        # An operator who wants sums that do not depend on the batch has them from vLLM's kernels.
        decoding_kernels=not vllm_envs.VLLM_BATCH_INVARIANT,
        gives_way=gives_way,
    )


def _queue_spec(config: StageConfig, edge: Edge, engines: Engines) -> QueueSpec:
    queue = engines.queues.get((edge.source, edge.target))
    producer, consumer = config.stages[edge.source], config.stages[edge.target]
    return QueueSpec(
        capacity=edge.queue.capacity,
        path=None if queue is None else str(queue.path),
        slot_bytes=0 if queue is None else queue.slot_bytes,
        max_portions=producer.max_num_seqs,
        num_consumers=consumer.tensor_parallel_size if isinstance(consumer, ArStage) else 1,
    )


def _make_queue(config: StageConfig, edge: Edge, model: FamilyModel) -> SlabQueue:
    layout = queue_layout(config, edge, model)
    return SlabQueue(
        new_queue_path(f"{edge.source}-{edge.target}"),
        capacity=layout.capacity,
        slot_bytes=layout.slot_bytes,
        max_portions=layout.max_portions,
        num_consumers=layout.num_consumers,
        create=True,
    )
