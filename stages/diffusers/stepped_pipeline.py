"""Runs an unchanged Diffusers pipeline for many requests at once, one denoising step at a time."""

import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from stages.diffusers.denoiser_calls import DenoiserCall, run_calls
from stages.diffusers.loras import Loras, LoraSwitch
from stages.diffusers.pipeline_run import PipelineRun, run_of_this_thread
from stages.diffusers.step_cache import StepCache

DENOISERS = ("transformer", "transformer_2", "unet")
"""The components of pipelines that are called in each step."""


def denoisers_of(pipe: Any) -> list[Any]:
    return [module for name in DENOISERS if (module := getattr(pipe, name, None)) is not None]


class SteppedPipeline:
    """Owns a pipeline; its components must not be used in any other way afterwards."""

    def __init__(self, pipe: Any, *, joins: bool = True) -> None:
        """With `joins` off, each request's calls of the denoiser are run alone.

        Raises `ValueError` for a pipeline without a denoiser that can be called in steps.
        """
        pipe.set_progress_bar_config(disable=True)
        self.pipe = pipe
        self.joins = joins
        self.num_passes = 0
        """Forward passes of denoisers so far."""
        self.num_calls = 0
        """Calls of denoisers by requests so far; more than the passes where calls were joined."""
        self.num_failed_joins = 0
        """Passes for several requests that failed and were computed one by one."""
        self.step_caches: list[StepCache] = []
        """Of the denoisers for which a step cache is enabled."""
        self._loras = LoraSwitch(pipe)
        denoisers = denoisers_of(pipe)
        if not denoisers or getattr(pipe, "scheduler", None) is None:
            raise ValueError(
                f"{type(pipe).__name__} has no {' or '.join(DENOISERS)} with a scheduler, so it cannot be run "
                "in steps"
            )
        for denoiser in denoisers:
            self._take_over(denoiser)

    def _take_over(self, denoiser: Any) -> None:
        """Makes the denoiser's calls in a request's thread wait for `step`."""
        forward = denoiser.forward
        names = list(inspect.signature(type(denoiser).forward).parameters)[1:]

        def gate(*args: Any, **kwargs: Any) -> Any:
            run = run_of_this_thread()
            if run is None:
                return forward(*args, **kwargs)
            arguments = dict(zip(names, args, strict=False)) | kwargs
            sample = arguments[names[0]]
            if run.clean_latents is not None:
                return _zero_prediction(sample, arguments)
            return run.denoise(
                DenoiserCall(forward, arguments, len(sample), run.shared_values, run.loras, run.cache_context)
            )

        denoiser.forward = gate
        if getattr(denoiser, "is_cache_enabled", False):
            self.step_caches.append(StepCache(denoiser))

    def takes(self, name: str) -> bool:
        """Whether the pipeline's `__call__` has the parameter."""
        return name in inspect.signature(type(self.pipe).__call__).parameters

    def start(self, arguments: Mapping[str, Any], loras: Loras = ()) -> PipelineRun:
        """Returns a run of the pipeline with these arguments, for `step`."""
        return PipelineRun(self.pipe, arguments, loras=loras)

    @torch.inference_mode()
    def step(self, runs: Sequence[PipelineRun]) -> None:
        """Denoises each of `runs` by one step. A run whose steps were all done before is decoded afterwards,
        and is over then; a run that fails is over, too."""
        ending = [run for run in runs if run.is_denoised]
        self._advance([run for run in runs if not run.is_denoised])
        for run in ending:
            self._advance([run])
        for run in runs:
            if run.is_over:
                self.forget(run)

    def _advance(self, runs: Sequence[PipelineRun]) -> None:
        """Until each run is at the end of a step or over."""
        moving = [run for run in runs if not run.is_over]
        while moving:
            for run in moving:
                if run.steps_done == 0:  # it may encode its prompt
                    self._loras.use(run.loras)
                run.resume()
            calling = [(run, run.call) for run in moving if run.call is not None]
            groups: dict[Hashable, list[DenoiserCall]] = {}
            for _, call in calling:
                groups.setdefault(call.key() if self.joins else id(call), []).append(call)
            for group in groups.values():
                self._loras.use(group[0].loras)
                num_passes = run_calls(group)
                self.num_passes += num_passes
                self.num_calls += len(group)
                self.num_failed_joins += num_passes > 1
            moving = [run for run, _ in calling]

    def preview(self, run: PipelineRun) -> Any:
        """Returns the pipeline's result for the estimate of `run` after its last step, or None if its
        scheduler has no estimate. Does not change the run."""
        if run.estimate is None:
            return None
        generator = torch.Generator().manual_seed(0)  # its noise is replaced
        shown = PipelineRun(self.pipe, run.arguments | {"generator": generator}, clean_latents=run.estimate())
        while not shown.is_over:
            shown.resume()
        if shown.error is not None:
            raise shown.error
        return shown.result

    def abort(self, run: PipelineRun) -> None:
        run.abort()
        self.forget(run)

    def forget(self, run: PipelineRun) -> None:
        """Frees what step caches hold of a run that is over."""
        for cache in self.step_caches:
            cache.forget(run)


def _zero_prediction(sample: torch.Tensor, arguments: Mapping[str, Any]) -> Any:
    """As denoisers return it."""
    if arguments.get("return_dict", True):
        return Transformer2DModelOutput(sample=torch.zeros_like(sample))
    return (torch.zeros_like(sample),)
