"""Builds the engine of one stage, at the start and again where it has died."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
from vllm import envs as vllm_envs
from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.config.stage_config import Edge, StageConfig
from omni_server.config.stages import ArStage, DiffusionStage
from omni_server.engine.ar_args import ar_engine_args
from omni_server.engine.async_engine import StageAsyncLLM
from omni_server.engine.construction import construct
from omni_server.engine.diffusion_args import diffusion_engine_args
from omni_server.engine.give_way import give_way_specs
from omni_server.engine.mps import MpsDaemon
from omni_server.engine.progress import StartProgress
from omni_server.engine.startup_threads import shared_startup_threads
from omni_server.engine.temp_folder import TempFolder
from omni_server.family import ModelFamily
from omni_server.protocol.engine_life import EngineLife
from omni_server.protocol.runtime_config import QueueSpec, StageRuntimeConfig
from omni_server.transport.slab_queue import SlabQueue


class StageLauncher:
    """What an engine of this deployment is built from. The queues are the same for as long as the server lives."""

    def __init__(
        self,
        model_dir: Path,
        config: StageConfig,
        family: ModelFamily,
        *,
        queues: Mapping[tuple[str, str], SlabQueue],
        temp: TempFolder,
        mps: MpsDaemon | None,
        load_format: str,
    ) -> None:
        self._model_dir = model_dir
        self._config = config
        self._family = family
        self._queues = queues
        self._temp = temp
        self._mps = mps
        self._load_format = load_format
        self._ways = give_way_specs(config)

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Engines are built inside of it: it says which part of the machine their processes may use, and where they
        put their temporary files."""
        with (
            self._temp.for_children(),
            shared_startup_threads(len(self._config.stages)),
            self._mps.for_children() if self._mps is not None else contextlib.nullcontext(),
        ):
            yield

    async def build(self, name: str, progress: StartProgress, keep: Callable[[], set[int]]) -> AsyncLLM:
        """The stage's engine, ready; a `StageAsyncLLM` for an autoregressive stage. For `keep` see `construct`. Raises
        `ConfigError`.
        """
        self._temp.check_room()
        config, stage = self._config, self._config.stages[name]
        overrides = self._family.hf_overrides(stage.model_stage)
        watched = progress.began(name)
        match stage:
            case ArStage():
                engine_class: type[AsyncLLM] = StageAsyncLLM
                arguments = ar_engine_args(
                    self._model_dir,
                    stage,
                    self._runtime_config(name),
                    platform=config.platform,
                    load_format=self._load_format,
                    hf_overrides=overrides,
                )
            case DiffusionStage():
                assert overrides is not None
                engine_class = AsyncLLM
                arguments = diffusion_engine_args(
                    self._model_dir,
                    stage,
                    platform=config.platform,
                    load_format=self._load_format,
                    hf_overrides=overrides,
                    carries_state=config.carries_state,
                    announces_to=tuple(self._ways.values()),
                )
        arguments.additional_config = msgspec.structs.replace(
            arguments.additional_config,
            life=EngineLife(),
            progress=watched,
            has_low_gpu_priority=stage.gpu_priority == "low",
        )
        build = functools.partial(engine_class.from_engine_args, arguments)
        engine = await construct(name, build, config.start_timeout_s, keep, progress)
        if isinstance(engine, StageAsyncLLM):
            edge = next((e for e in config.edges if e.source == name), None)
            if edge is not None:
                engine.row_queue = self._queues.get((edge.source, edge.target))
        progress.is_ready(name)
        return engine

    def _runtime_config(self, name: str) -> StageRuntimeConfig:
        edges = self._config.edges
        outgoing = next((e for e in edges if e.source == name and e.chunks is None), None)
        incoming = next((e for e in edges if e.target == name), None)
        return StageRuntimeConfig(
            model_dir=str(self._model_dir),
            row_producer=None if outgoing is None else outgoing.function,
            output_queue=None if outgoing is None else self._queue_spec(outgoing),
            input_queue=None if incoming is None else self._queue_spec(incoming),
            # An operator who wants sums that do not depend on the batch has them from vLLM's kernels.
            decoding_kernels=not vllm_envs.VLLM_BATCH_INVARIANT,
            gives_way=self._ways.get(name),
        )

    def _queue_spec(self, edge: Edge) -> QueueSpec:
        queue = self._queues.get((edge.source, edge.target))
        producer, consumer = self._config.stages[edge.source], self._config.stages[edge.target]
        return QueueSpec(
            capacity=edge.queue.capacity,
            path=None if queue is None else str(queue.path),
            slot_bytes=0 if queue is None else queue.slot_bytes,
            max_portions=producer.max_num_seqs,
            num_consumers=consumer.tensor_parallel_size if isinstance(consumer, ArStage) else 1,
        )
