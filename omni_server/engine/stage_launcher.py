"""Builds the engine of one stage, at the start and again where it has died."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
from vllm import envs as vllm_envs
from vllm.utils.torch_utils import OMP_NUM_THREADS_SET_BY_VLLM, startup_omp_num_threads
from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.config.pipeline import MODEL_FAMILY_VARIABLE, Embeddings
from omni_server.config.stage_config import Edge, StageConfig
from omni_server.config.stages import ArStage, DiffusionStage
from omni_server.engine.ar_args import ar_engine_args
from omni_server.engine.async_engine import StageAsyncLLM
from omni_server.engine.construction import BuiltEngine, build_engine
from omni_server.engine.diffusion_args import diffusion_engine_args
from omni_server.engine.mps import MpsDaemon
from omni_server.engine.process_files import TempFolder
from omni_server.engine.start_progress import StartProgress
from omni_server.family import ModelFamily
from omni_server.protocol.local_socket import new_socket_name
from omni_server.protocol.runtime_config import QueueSpec, StageRuntimeConfig, StepThrottleSpec
from omni_server.transport.slab_queue import SlabQueue


def step_throttles(config: StageConfig) -> dict[str, StepThrottleSpec]:
    """By name the autoregressive stages with a step interval that share a GPU with a decoder. Each has a
    socket of its own, a new one at each call. Empty on CPU."""
    if config.platform != "cuda":
        return {}
    diffusion = [stage for stage in config.stages.values() if isinstance(stage, DiffusionStage)]
    return {
        name: StepThrottleSpec(
            new_socket_name(), stage.step_interval_per_stream_ms / 1000, stage.max_num_seqs
        )
        for name, stage in config.stages.items()
        if isinstance(stage, ArStage) and stage.step_interval_per_stream_ms
        if any(not set(stage.devices).isdisjoint(other.devices) for other in diffusion)
    }


class StageLauncher:
    """What an engine of this deployment is built from. The queues are the same for as long as the server
    lives."""

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
        self._throttles = step_throttles(config)
        # On CPUs vLLM sets variables in this process whenever it makes an engine's config. All engines get
        # the same environment, those of a restart too.
        self._variables = dict(os.environ)

    async def build(
        self, name: str, progress: StartProgress
    ) -> BuiltEngine[StageAsyncLLM] | BuiltEngine[AsyncLLM]:
        """The stage's engine, ready; with a `StageAsyncLLM` for an autoregressive stage. Raises
        `ConfigError`."""
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
                    announces_to=tuple(throttle.socket for throttle in self._throttles.values()),
                )
        arguments.additional_config = msgspec.structs.replace(
            arguments.additional_config,
            progress=watched,
            has_low_gpu_priority=stage.gpu_priority == "low",
        )
        built = await build_engine(
            name,
            engine_class,
            arguments,
            environment=self._environment(),
            folder=self._temp.path,
            timeout_s=config.start_timeout_s,
            progress=progress,
        )
        if isinstance(built.client, StageAsyncLLM):
            edge = config.edge_from(name, Embeddings)
            if edge is not None:
                built.client.output_processor.row_queue = self._queues.get((edge.source, edge.target))
        progress.is_ready(name)
        return built

    def _environment(self) -> dict[str, str]:
        """Of an engine's process: which part of the machine it may use, and where it puts its temporary
        files."""
        variables = (
            self._variables
            | dict(self._temp.variables())
            | {MODEL_FAMILY_VARIABLE: self._config.model_family}
        )
        if self._mps is not None:
            variables |= self._mps.variables()
        if "OMP_NUM_THREADS" not in self._variables:
            # An engine loads weights on its part of the cores and serves on one thread. vLLM does the same
            # where it starts the process; it counts the engines of one model only.
            variables["OMP_NUM_THREADS"] = str(startup_omp_num_threads(len(self._config.stages)))
            variables[OMP_NUM_THREADS_SET_BY_VLLM] = "1"
        return variables

    def _runtime_config(self, name: str) -> StageRuntimeConfig:
        outgoing = self._config.edge_from(name, Embeddings)
        incoming = self._config.edge_into(name)
        return StageRuntimeConfig(
            model_dir=str(self._model_dir),
            row_producer=None if outgoing is None else outgoing.function,
            output_queue=None if outgoing is None else self._queue_spec(outgoing),
            input_queue=None if incoming is None else self._queue_spec(incoming),
            # An operator who wants sums that do not depend on the batch has them from vLLM's kernels.
            decoding_kernels=not vllm_envs.VLLM_BATCH_INVARIANT,
            step_throttle=self._throttles.get(name),
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
