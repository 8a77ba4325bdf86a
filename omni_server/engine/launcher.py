"""Starts the engines of a stage config, and stops them."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from vllm import envs as vllm_envs
from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.config.stage_config import Edge, StageConfig
from omni_server.engine import fork_server
from omni_server.engine.ar_client import ArStageClient
from omni_server.engine.async_engine import StageAsyncLLM
from omni_server.engine.cancellation import uninterrupted
from omni_server.engine.construction import BuiltEngine
from omni_server.engine.diffusion_client import DiffusionStageClient
from omni_server.engine.environment import compiles
from omni_server.engine.mps import MpsDaemon, start_mps
from omni_server.engine.process_files import TempFolder, check_cache_folder, sweep_dead_folders
from omni_server.engine.queue_layout import queue_layout
from omni_server.engine.stage_launcher import StageLauncher
from omni_server.engine.start_progress import StartProgress
from omni_server.family import FamilyModel, ModelFamily
from omni_server.protocol.rows import SharedBlock
from omni_server.transport.block_ledger import BlockLedger
from omni_server.transport.slab_queue import SlabQueue, new_queue_path, sweep_dead_queues

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

AnyStageClient = ArStageClient | DiffusionStageClient


@dataclass
class Engines:
    """Everything that runs; `stop` ends it."""

    ar: dict[str, ArStageClient] = field(default_factory=dict)
    diffusion: dict[str, DiffusionStageClient] = field(default_factory=dict)
    queues: dict[tuple[str, str], SlabQueue] = field(default_factory=dict)
    ledgers: dict[tuple[str, str], BlockLedger] = field(default_factory=dict)
    mps: MpsDaemon | None = None
    temp: TempFolder | None = None

    def clients(self) -> Iterator[AnyStageClient]:
        yield from self.ar.values()
        yield from self.diffusion.values()

    def attach(self, name: str, built: BuiltEngine[StageAsyncLLM] | BuiltEngine[AsyncLLM]) -> None:
        """`built` is the stage's engine from now on: its first one, or the successor of one that died."""
        if name in self.ar:
            self.ar[name].attach(cast(BuiltEngine[StageAsyncLLM], built))
        elif name in self.diffusion:
            self.diffusion[name].attach(cast(BuiltEngine[AsyncLLM], built))
        elif isinstance(built.client, StageAsyncLLM):
            output = next((ledger for (source, _), ledger in self.ledgers.items() if source == name), None)
            taken = next((ledger for (_, target), ledger in self.ledgers.items() if target == name), None)
            ar = cast(BuiltEngine[StageAsyncLLM], built)
            self.ar[name] = ArStageClient(name, ar, output_ledger=output, input_ledger=taken)
        else:
            self.diffusion[name] = DiffusionStageClient(name, built)

    def drop_block(self, block: SharedBlock) -> None:
        """End a reference that nobody will follow any more, unless it was ended in the place of an engine
        that died. There is one edge that carries rows."""
        (queue,) = self.queues.values()
        if queue.is_open(block):
            queue.finish_all(block)

    def end_blocks_of(self, stage: str) -> int:
        """End what an engine that is gone has left in the queues; returns how many blocks that were."""
        num_blocks = 0
        for (source, target), ledger in self.ledgers.items():
            if source == stage:
                num_blocks += ledger.producer_died()
            if target == stage:
                num_blocks += ledger.consumer_died()
        return num_blocks

    def num_active(self) -> dict[str, int]:
        """Requests that each stage has not finished."""
        return {client.name: client.num_active for client in self.clients()}

    def pids(self) -> dict[str, int]:
        """Process id of the engine of each stage that is up."""
        return {client.name: pid for client in self.clients() if (pid := client.pid) is not None}

    async def stop(self) -> None:
        """Shut the engine processes down and remove the queues, also where some have died."""
        if self.temp is not None:
            self.temp.announce_end()
        try:
            await asyncio.gather(*(client.shutdown() for client in self.clients()))
        finally:
            for queue in self.queues.values():
                queue.close()
            self.queues.clear()
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
) -> tuple[Engines, StageLauncher]:
    """All engines of `config`, ready, and what makes another one of a stage; they start side by side.
    `on_progress` gets a line for each step of each stage.

    Raises `ConfigError` if one does not come up; nothing is left behind then.
    """
    for path in sweep_dead_queues() + sweep_dead_folders():
        logger.warning("removed %s, left by a server that was killed", path)
    check_cache_folder(Path(vllm_envs.VLLM_CACHE_ROOT), compiles=compiles(config))
    family.register()
    engines = Engines()
    try:
        for edge in config.edges:
            if edge.queue.transport == "shared_memory":
                queue = engines.queues[edge.source, edge.target] = _make_queue(config, edge, model)
                engines.ledgers[edge.source, edge.target] = BlockLedger(queue)
        engines.temp = TempFolder()
        engines.mps = start_mps(config, engines.temp.path)
        fork_server.start(family)
        launcher = StageLauncher(
            model_dir,
            config,
            family,
            queues=engines.queues,
            temp=engines.temp,
            mps=engines.mps,
            load_format=load_format,
        )
        with StartProgress(on_progress) as progress:
            async with asyncio.TaskGroup() as group:
                for name in config.stages:
                    group.create_task(_start_stage(launcher, name, progress, engines))
    except BaseException as exc:
        await uninterrupted(engines.stop())
        if isinstance(exc, BaseExceptionGroup):
            raise exc.exceptions[0] from None
        raise
    return engines, launcher


async def _start_stage(launcher: StageLauncher, name: str, progress: StartProgress, engines: Engines) -> None:
    engines.attach(name, await launcher.build(name, progress))


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
