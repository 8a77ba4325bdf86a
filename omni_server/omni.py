"""The whole pipeline as one object, for the server and for programs with their own event loop."""

import asyncio
import hashlib
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from omni_server.config.model_folder import config_file, read_about
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import ArStage
from omni_server.engine.environment import set_engine_environment
from omni_server.errors import ConfigError, OmniError, StageDownError, first_leaf
from omni_server.family import FamilyModel, load_family, open_model
from omni_server.generation import Deliver, Generation
from omni_server.metrics.stage_metrics import QueueLevel, StageLevel, pipeline_text
from omni_server.orchestrator.codec_edge import check_longest_window
from omni_server.protocol.corruption import CORRUPTION_KINDS
from omni_server.protocol.replica_control import Replica, ReplicaStatus
from omni_server.types import (
    SAMPLE_RATE_HZ,
    AboutModel,
    AudioPart,
    ChatMessage,
    ClonedVoice,
    ContentPart,
    Finished,
    ImagePart,
    ModelInfo,
    OmniEvent,
    OmniRequest,
    SamplingConfig,
    SpeechOutput,
    Task,
    TextPart,
    TokenizedPrompt,
)
from omni_server.types.images import ImageFeatures, ImageOutput
from omni_server.version import VERSION

if TYPE_CHECKING:  # importing them imports vLLM, whose environment `start` sets first
    from omni_server.engine.ar_handle import WorkerCount
    from omni_server.engine.engine_handle import EngineHandle
    from omni_server.engine.launcher import Engines
    from omni_server.engine.supervisor import Supervisor
    from omni_server.orchestrator.orchestrator import Orchestrator

Progress = Callable[[str], None]

WARM_UP_LENGTH = 4
"""Tokens, or frames of codec tokens, that each stage generates for a warm-up request."""
WARM_UP_STEPS = 2
"""Of a warm-up image, where the model works in steps."""
NO_IMAGE_FEATURES = ImageFeatures()
_SHORT_NOISE = AudioPart(
    np.random.default_rng(0).normal(0, 0.1, SAMPLE_RATE_HZ).astype(np.float32), SAMPLE_RATE_HZ
)


class AsyncOmni:
    """Implements `omni_server.generation.Generator`. Use `start` and `stop`."""

    def __init__(
        self,
        model_info: ModelInfo,
        engines: "Engines",
        supervisor: "Supervisor",
        orchestrator: "Orchestrator",
        config: StageConfig,
        warm_up_speech: SpeechOutput,
    ) -> None:
        self.model_info = model_info
        self._warm_up_speech = warm_up_speech
        self._config = config
        self._engines = engines
        self._supervisor = supervisor
        self._orchestrator = orchestrator
        self._is_warm = False

    @classmethod
    async def start(
        cls,
        model_dir: Path,
        config: StageConfig,
        *,
        served_model_names: tuple[str, ...] = (),
        load_format: str = "auto",
        on_progress: Progress = lambda line: None,
    ) -> Self:
        """Start all engines and warm them up with requests.

        `load_format` is vLLM's ("auto", "dummy", ...). `on_progress` receives one line per step. Raises
        `ConfigError` if the folder, the config or the machine is unsuitable.
        """
        set_engine_environment(config)
        # vLLM reads its environment on import, so modules that import it are imported here.
        from omni_server.engine.launcher import start_engines
        from omni_server.engine.supervisor import Supervisor
        from omni_server.orchestrator.orchestrator import Orchestrator

        family = load_family(config.model_family)
        model = open_model(family, model_dir)
        about = read_about(model_dir)
        check_longest_window(config, model)
        engines = await start_engines(
            model_dir, config, family, model, load_format=load_format, on_progress=on_progress
        )
        try:
            supervisor = Supervisor(
                engines.stages(), config.supervision, lambda handle: omni._warm_up_engine(handle)
            )
            orchestrator = Orchestrator(
                model,
                config,
                ar=engines.ar,
                diffusion=engines.diffusion,
                request_timeout_s=config.request_timeout_s,
            )
            info = _model_info(model_dir, config, model, engines, orchestrator, served_model_names, about)
            omni = cls(info, engines, supervisor, orchestrator, config, model.warm_up_speech)
            await _while_all_live(omni._warm_up(on_progress), engines)
            supervisor.start()
        except BaseException:
            await engines.stop()
            raise
        return omni

    async def submit(
        self, request: OmniRequest, deliver: Deliver, pinned_engine: "EngineHandle | None" = None
    ) -> Generation:
        """`pinned_engine`: the engine to choose in its stage, for a warm-up."""
        return await self._orchestrator.submit(request, deliver, pinned_engine)

    async def events(
        self, request: OmniRequest, pinned_engine: "EngineHandle | None" = None
    ) -> AsyncGenerator[OmniEvent, None]:
        """Yields the request's events. Raises the errors of `submit`, and `OmniError` if the request fails.
        Closing it ends the request."""
        events: asyncio.Queue[OmniEvent | Exception] = asyncio.Queue()
        generation = await self.submit(request, events.put_nowait, pinned_engine)
        try:
            event: OmniEvent | Exception | None = None
            while not isinstance(event, Finished):
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            await generation.aclose()

    async def tokenize(self, request: OmniRequest) -> TokenizedPrompt:
        return await self._orchestrator.tokenize(request)

    async def clone_voice(self, recording: AudioPart, text: str = "") -> ClonedVoice:
        return await self._orchestrator.clone_voice(recording, text)

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        return self._orchestrator.task_messages(task)

    def is_ready(self) -> bool:
        return self._is_warm and self.is_alive()

    def is_alive(self) -> bool:
        return self._supervisor.failed_stage is None

    def stage_down(self) -> StageDownError | None:
        return self._orchestrator.stage_down()

    def failed_replicas(self) -> tuple[str, ...]:
        return self._supervisor.failed

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Decodes the text stage's `token_ids` without special tokens."""
        return self._orchestrator.detokenize(token_ids)

    @property
    def num_running(self) -> int:
        """Requests between submission and release."""
        return self._orchestrator.num_running

    async def worker_count(self, name: "WorkerCount") -> dict[str, int]:
        """`ArHandle.worker_count` per autoregressive stage."""
        return {handle.name: await handle.worker_count(name) for handle in self._engines.ar_handles()}

    def row_slots(self) -> dict[tuple[str, str], QueueLevel]:
        """The fill level of each shared-memory queue, by the replica of the source and the target stage."""
        return {
            (handle.name, target): QueueLevel(
                ledger.queue.capacity, ledger.queue.num_in_use(), ledger.queue.num_published()
            )
            for (source, target), ledgers in self._engines.ledgers.items()
            for handle, ledger in zip(self._engines.ar[source].handles, ledgers, strict=True)
        }

    def metrics_text(self) -> bytes:
        return pipeline_text(
            self.model_info.name,
            {handle.name: handle.metrics for handle in self._engines.ar_handles()},
            self._engines.num_active(),
            self.row_slots(),
            self._stage_levels(),
        )

    def _stage_levels(self) -> dict[str, StageLevel]:
        restarts, failed = self._supervisor.num_restarts, self._supervisor.failed
        corrupt = self._orchestrator.num_corrupt
        return {
            handle.name: StageLevel(
                is_up=not handle.is_dead,
                has_failed=handle.name in failed,
                num_restarts=restarts[handle.name],
                num_corrupt={kind: corrupt[handle.name, kind] for kind in CORRUPTION_KINDS},
            )
            for handle in self._engines.handles()
        }

    def engine_pids(self) -> dict[str, int]:
        """Process ids of the engines that are up."""
        return self._engines.pids()

    @property
    def folder(self) -> Path:
        """A folder of this server that no other user can enter, for sockets."""
        assert self._engines.temp is not None
        return self._engines.temp.path

    def replicas(self) -> tuple[Replica, ...]:
        """The state of all replicas of all stages."""
        restarts, failed = self._supervisor.num_restarts, self._supervisor.failed

        def status(handle: "EngineHandle") -> ReplicaStatus:
            if handle.is_dead:
                return "failed" if handle.name in failed else "down"
            return "draining" if handle.is_draining else "up"

        return tuple(
            Replica(handle.name, handle.pid, handle.num_requests, restarts[handle.name], status(handle))
            for handle in self._engines.handles()
        )

    async def replace(self, replica: str, timeout_s: float | None = None) -> int:
        """Replaces the engine of a replica, such as `talker/1`, by a new one, without an error for any
        request. Waits for the requests that it has, for `timeout_s` at most; by default, as long as a request
        may take. Returns the process id of the new engine.

        Raises `ReplacementError`.
        """
        limit_s = self._config.request_timeout_s if timeout_s is None else timeout_s
        return await self._supervisor.replace(replica, limit_s)

    async def stop(self) -> None:
        """Release running requests, stop engines, remove queues."""
        await self._orchestrator.close()
        await self._supervisor.stop()
        await self._engines.stop()

    async def _warm_up(self, on_progress: Progress) -> None:
        """Send bursts of short requests (`_burst_sizes`) through every engine, to trigger slow first-time
        work and reveal failures."""
        began = time.monotonic()
        # They are spread over the replicas of a stage.
        most_replicas = max(stage.replicas for stage in self._config.stages.values())
        burst_sizes = [size * most_replicas for size in _burst_sizes(self._config)]
        try:
            await self._send_bursts(burst_sizes)
            if "voice" in self._config.outputs:
                await self.clone_voice(_SHORT_NOISE, "Hello")
        except OmniError as error:
            raise ConfigError(f"the first request through all stages failed: {error}") from error
        for handle in self._engines.ar_handles():
            handle.metrics.clear()
        self._orchestrator.reset_timings()
        self._is_warm = True
        requests = (
            "a request"
            if list(burst_sizes) == [1]
            else f"{sum(burst_sizes)} requests, up to {max(burst_sizes)} at once,"
        )
        on_progress(f"{requests} went through all stages in {time.monotonic() - began:.1f} s")

    async def _warm_up_engine(self, handle: "EngineHandle") -> None:
        """Like `_warm_up`, for one engine. Raises `OmniError`."""
        await self._send_bursts(_burst_sizes(self._config), handle)

    async def _send_bursts(self, sizes: Sequence[int], pinned_engine: "EngineHandle | None" = None) -> None:
        """`pinned_engine`: the engine to choose in its stage. Raises `OmniError`."""
        try:
            for size in sizes:
                async with asyncio.TaskGroup() as burst:
                    for number in range(size):
                        request = warm_up_request(
                            self._config,
                            is_greedy=number % 2 == 1,
                            features=self.model_info.image_features,
                            speech=self._warm_up_speech,
                        )
                        burst.create_task(self._answer(request, pinned_engine))
                        if self._config.reader not in (None, self._config.entry):
                            # That request has its text read. Another stage writes one.
                            request = replace(request, request_id=f"{request.request_id}-text", speech=None)
                            burst.create_task(self._answer(request, pinned_engine))
        except ExceptionGroup as group:
            failures = group.subgroup(OmniError)
            if failures is None:
                raise
            raise first_leaf(failures) from group

    async def _answer(self, request: OmniRequest, pinned_engine: "EngineHandle | None") -> None:
        async for _ in self.events(request, pinned_engine):
            pass


def warm_up_request(
    config: StageConfig,
    *,
    is_greedy: bool,
    features: ImageFeatures = NO_IMAGE_FEATURES,
    speech: SpeechOutput = FamilyModel.warm_up_speech,
) -> OmniRequest:
    """A short request that passes every stage of `config`. `features` are those of the model's images,
    `speech` is its `warm_up_speech`."""
    edge = config.speech_edge
    sampling: dict[str, SamplingConfig] = {}
    for name, stage in config.stages.items():
        if isinstance(stage, ArStage):
            length = WARM_UP_LENGTH
            if edge is not None and name == edge.source:
                length *= config.frames.num_sampled  # an incomplete frame never reaches the decoder
            sampling[name] = SamplingConfig(
                temperature=0.0 if is_greedy else 1.0, max_tokens=length, min_tokens=length, ignore_eos=True
            )
    content: tuple[ContentPart, ...] = (TextPart("Hello"),)
    if features.needs_input_image:
        content += (ImagePart(np.full((64, 64, 3), 128, np.uint8)),)
    num_steps = WARM_UP_STEPS if "num_steps" in features.parameters else None
    return OmniRequest(
        f"warm-up-{uuid.uuid4().hex}",
        (ChatMessage("user", content),),
        speech=speech if "audio" in config.outputs else None,
        image=ImageOutput(num_steps=num_steps) if "image" in config.outputs else None,
        sampling=sampling,
        is_logged=False,
    )


async def _while_all_live(work: Coroutine[object, object, None], engines: "Engines") -> None:
    """Awaits `work`, before the supervisor runs. Raises `ConfigError` if an engine dies meanwhile."""
    working = asyncio.create_task(work)
    deaths = {asyncio.create_task(handle.processes.until_ended()): handle for handle in engines.handles()}
    try:
        await asyncio.wait((working, *deaths), return_when=asyncio.FIRST_COMPLETED)
        for death, handle in deaths.items():
            if death.done():
                raise ConfigError(f"stage '{handle.name}' has died: {handle.processes.why_ended()}")
        await working
    finally:
        for task in (working, *deaths):
            task.cancel()
        await asyncio.wait((working, *deaths))


def _burst_sizes(config: StageConfig) -> list[int]:
    """Numbers of concurrent requests in the warm-up bursts.

    On a GPU, kernels are compiled at first use, for batch sizes up to the next power of two, which blocks all
    requests for a second. On a CPU nothing is compiled.
    """
    if config.platform == "cpu":
        return [1]
    largest = min(config.stages[name].max_num_seqs for name in config.stages_for(config.outputs - {"voice"}))
    return [2**power for power in range(largest.bit_length())]


def _model_info(
    model_dir: Path,
    config: StageConfig,
    model: FamilyModel,
    engines: "Engines",
    orchestrator: "Orchestrator",
    names: tuple[str, ...],
    about: AboutModel | None,
) -> ModelInfo:
    stage = engines.ar.get(config.entry)
    handle = None if stage is None else stage.any_engine
    first, *aliases = names or (model_dir.name,)
    speaks = "audio" in config.outputs
    text_stage = next((name for name in config.stages if config.stage_spec(name).output == "text"), None)
    features = orchestrator.images.features
    inputs = model.input_modalities
    max_media = {} if handle is None else {kind: handle.max_media(kind) for kind in inputs}
    if text_stage is None and features.max_input_images:
        inputs, max_media = ("image",), {"image": features.max_input_images}
    return ModelInfo(
        name=first,
        aliases=tuple(aliases),
        voices=model.voices if speaks else (),
        default_voice=model.default_voice if speaks else None,
        outputs=config.outputs,
        text_stage=text_stage,
        speech_stage=None if config.speech_edge is None else config.speech_edge.source,
        max_model_len=config.stages[config.entry].max_model_len if handle is None else handle.max_model_len,
        input_modalities=inputs,
        max_media_per_prompt=max_media,
        created=int(time.time()),
        fingerprint=fingerprint_of(model_dir, config),
        about=about,
        longest_speech_s=_longest_speech_s(config, model),
        image_sizes=orchestrator.images.sizes if "image" in config.outputs else (),
        image_features=features,
        hears_videos=model.hears_videos,
        reads_text=config.reader is not None,
    )


def _longest_speech_s(config: StageConfig, model: FamilyModel) -> float:
    stage = None if config.speech_edge is None else config.stages[config.speech_edge.source]
    most = stage.default_sampling.max_tokens if isinstance(stage, ArStage) else None
    if stage is None or most is None or model.codec is None:
        return math.inf
    limit = min(most, stage.max_model_len)
    return model.codec.first_sample(limit // config.frames.num_sampled) / model.codec.sample_rate_hz


def fingerprint_of(model_dir: Path, config: StageConfig) -> str:
    digest = hashlib.sha256()
    for part in (
        VERSION.encode(),
        config_file(model_dir).read_bytes(),
        config.model_dump_json().encode(),
    ):
        digest.update(part)
    return f"fp_{digest.hexdigest()[:10]}"
