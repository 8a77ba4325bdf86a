"""Runs a Diffusers pipeline in an engine: requests in, images, previews and progress out."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.tasks import SupportedTask
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from omni_server.protocol.diffusion import INPUT_KEY
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.protocol.images import (
    ImageJob,
    Preview,
    StageEvent,
    StepProgress,
    decode_job,
    encode_event,
    num_image_tokens,
)
from omni_server.protocol.start_report import Phase
from omni_server.transport.result import Failure, Refusal, encode_failure
from stages.diffusers.family import input_image_tokens
from stages.diffusers.images import finished_image, pipeline_arguments, preview_pixels, preview_steps
from stages.diffusers.loading import load_pipeline
from stages.diffusers.options import DiffusersStage
from stages.diffusers.pipeline_folder import read_pipeline_folder
from stages.diffusers.pipeline_run import PipelineRun
from stages.diffusers.stepped_pipeline import SteppedPipeline
from stages.diffusers.warm_up import warm_up
from stages.runtime import engine_start
from stages.runtime.memory import enforce_share
from stages.runtime.step_scheduler import StepOutput

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Request:
    """One image under way."""

    run: PipelineRun
    preview_steps: list[int]
    """Steps after which a preview is due, in order."""
    num_previews: int = 0
    events: list[StageEvent] = field(default_factory=list)
    """Of the current step."""


class PipelineWorker(WorkerBase):
    """A pipeline has no KV cache, no sampler and no input batch, so no model runner of vLLM's is involved.

    Raises `TypeError` unless `additional_config` is a `DiffusionRuntimeConfig` with a `DiffusersStage`.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        runtime = vllm_config.additional_config
        if not isinstance(runtime, DiffusionRuntimeConfig) or not isinstance(runtime.stage, DiffusersStage):
            raise TypeError(
                "a Diffusers pipeline needs additional_config=DiffusionRuntimeConfig(DiffusersStage(...), ...)"
            )
        self._runtime = runtime
        self._stage = runtime.stage
        self._device = torch.device("cpu")
        self._share: int | None = None
        """Of the device's memory, in bytes; None on a CPU."""
        self._requests: dict[str, _Request] = {}
        self._failed: dict[str, Failure] = {}
        """Requests that could not be started."""
        self._pipeline: SteppedPipeline

    # -- start

    def init_device(self) -> None:
        self._progress = engine_start.begin(self._runtime)
        if current_platform.is_cpu():
            return
        self._device = torch.device("cuda", 0)  # the only one that the engine's process sees
        torch.cuda.set_device(self._device)
        self._share = request_memory(MemorySnapshot(device=self._device), self.vllm_config.cache_config)
        enforce_share(self._share, self._device)

    def load_model(self) -> None:
        """Raises `ConfigError` for a folder or an option that cannot be served."""
        self._progress.report(Phase.LOADING)
        pipe = load_pipeline(
            self.vllm_config.model_config.model,
            self._stage,
            self._runtime.compute_dtype,
            self._device,
            random_weights=self.vllm_config.load_config.load_format == "dummy",
        )
        self._pipeline = SteppedPipeline(pipe, joins=self._stage.join_requests)
        self._progress.report(Phase.LOADED)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Raises `ConfigError` if the largest step does not fit the device or returns no image."""
        folder = read_pipeline_folder(Path(self.vllm_config.model_config.model))
        self._progress.report(Phase.MEASURING)
        found = warm_up(
            self._pipeline,
            self._stage,
            device=self._device,
            share=self._share,
            input_tokens=input_image_tokens(folder),
        )
        self._progress.report(Phase.BUDGETED, found)
        return CompilationTimes(language_model=0.0, encoder=0.0)

    # -- steps

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Returns an image for each request that is finished, `encode_failure` for one that failed, and None
        and the events for all others."""
        for request_id in scheduler_output.finished_req_ids:  # the aborted ones among them are not over yet
            self._failed.pop(request_id, None)
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._pipeline.abort(request.run)
        for new in scheduler_output.scheduled_new_reqs:
            self._start(new)
        request_ids = list(scheduler_output.num_scheduled_tokens)
        if not request_ids:
            return EMPTY_MODEL_RUNNER_OUTPUT
        scheduled = {name: self._requests[name] for name in request_ids if name in self._requests}
        self._pipeline.step([request.run for request in scheduled.values()])
        results: dict[str, torch.Tensor | Failure | None] = {}
        for request_id, request in scheduled.items():
            results[request_id] = self._outcome(request_id, request)
        for request_id in request_ids:
            if request_id in self._failed:
                results[request_id] = self._failed.pop(request_id)
            if results[request_id] is not None:
                self._requests.pop(request_id, None)
        return StepOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[[] for _ in request_ids],
            pooler_output=[_encoded(results[request_id]) for request_id in request_ids],
            events={name: [encode_event(e) for e in request.events] for name, request in scheduled.items()},
        )

    def _start(self, new: NewRequestData) -> None:
        extra = {} if new.pooling_params is None else new.pooling_params.extra_kwargs or {}
        payload = extra.get(INPUT_KEY)
        try:
            if not isinstance(payload, bytes):
                raise ValueError(f"the request has no '{INPUT_KEY}' of type bytes")
            job = decode_job(payload)
            self._check_tokens(job, len(new.prompt_token_ids or ()))
            arguments = pipeline_arguments(self._pipeline.pipe, job)
        except ValueError as error:
            self._failed[new.req_id] = str(error)
            return
        self._requests[new.req_id] = _Request(
            self._pipeline.start(arguments, job.loras), preview_steps(arguments, job.num_partial_images)
        )

    def _check_tokens(self, job: ImageJob, num_tokens: int) -> None:
        needed = num_image_tokens(job.width, job.height)
        if num_tokens < needed:
            raise ValueError(f"an image of {job.width}x{job.height} has {needed} tokens, not {num_tokens}")

    def _outcome(self, request_id: str, request: _Request) -> torch.Tensor | Failure | None:
        """Returns the image of a run that is over; else None, and sets the events."""
        run = request.run
        if run.error is None and not run.is_over:
            request.events = [StepProgress(run.steps_done, run.num_steps or 0)]
            if not request.preview_steps or run.steps_done < request.preview_steps[0]:
                return None
            request.preview_steps.pop(0)
            try:
                shown = self._pipeline.preview(run)
                if shown is not None:
                    pixels = preview_pixels(shown)
                    request.events.append(Preview(request.num_previews, pixels))
                    request.num_previews += 1
                return None
            except Exception as error:  # noqa: BLE001 - the outcome of the run
                self._pipeline.abort(run)
                run.error = error
        request.events = []
        if run.error is None:
            return finished_image(run)
        failure, run.error = run.error, None  # the frames of its traceback hold tensors, and the run
        if isinstance(failure, ValueError) and not run.has_called_denoiser:
            # Pipelines check their arguments first. `warm_up` has shown that this one can run.
            logger.info("request %s was refused by the pipeline", request_id, exc_info=failure)
            return Refusal("invalid_value", f"the model's pipeline refused the request: {failure}")
        if isinstance(failure, torch.AcceleratorError):
            # The device context is lost and no later step can succeed, so the engine must end.
            raise failure
        logger.error("request %s failed", request_id, exc_info=failure)
        return f"{type(failure).__name__}: {failure}"

    def shutdown(self) -> None:
        for request in self._requests.values():
            self._pipeline.abort(request.run)
        self._requests.clear()

    def counts(self) -> dict[str, int]:
        """For `collective_rpc`: images under way, calls of the denoiser, and passes in which they were
        computed."""
        pipeline = self._pipeline
        return {"requests": len(self._requests), "calls": pipeline.num_calls, "passes": pipeline.num_passes}

    # -- there is no KV cache

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["LBNHC"]

    def initialize_from_config(self, kv_cache_configs: Any) -> None: ...

    def determine_available_memory(self) -> int:
        return 0

    def get_supported_tasks(self) -> tuple[SupportedTask, ...]:
        return ("plugin",)

    def reset_encoder_cache(self) -> None: ...


def _encoded(result: torch.Tensor | Failure | None) -> torch.Tensor | None:
    return result if result is None or isinstance(result, torch.Tensor) else encode_failure(result)
