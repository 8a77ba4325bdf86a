"""One request's call of a pipeline, which can be suspended between its denoising steps.

Diffusers' pipelines are loops over the steps, without a way to stop in the middle. Here the pipeline's own
`__call__` runs in a thread of the request. Only one thread runs at any time: `PipelineRun.resume` lets the
request's thread run and waits until it *parks*, at a call of the denoiser or at the end of a step.
"""

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from stages.diffusers.denoiser_calls import DenoiserCall, SharedValues
from stages.diffusers.loras import Loras


class AbortedError(BaseException):
    """Raised inside a pipeline that is no longer needed. Not an `Exception`: no pipeline may handle it."""


class PipelineRun:
    """A suspended call of a pipeline. `resume` starts it. Belongs to one thread, apart from its own."""

    def __init__(
        self,
        pipe: Any,
        arguments: Mapping[str, Any],
        *,
        loras: Loras = (),
        clean_latents: torch.Tensor | None = None,
    ) -> None:
        """`arguments` are those of the pipeline's `__call__`. Whoever resumes the run applies its `loras`.

        With `clean_latents` nothing is denoised: every step returns these latents, so the pipeline decodes
        them with its own code.
        """
        # Its own scheduler and flags, and the same modules.
        self.pipe = copy.copy(pipe)
        self.pipe.scheduler = copy.deepcopy(pipe.scheduler)
        self._step = self.pipe.scheduler.step
        self._step_signature = inspect.signature(self._step)
        # Pipelines look at the signature.
        self.pipe.scheduler.step = functools.wraps(self._step)(lambda *a, **k: self._scheduler_step(*a, **k))
        self.arguments = dict(arguments)
        self.loras = loras
        self.clean_latents = clean_latents
        self.shared_values = SharedValues()
        self.cache_context: Callable[[], AbstractContextManager[Any]] | None = None
        """The step cache's context of the calls that the pipeline makes now."""
        self.steps_done = 0
        self.num_steps: int | None = None
        """All steps of the request; None before the first is done, and if the pipeline never says."""
        self.latents: torch.Tensor | None = None
        """After the last step."""
        self.estimate: Callable[[], torch.Tensor] | None = None
        """Returns the estimate of the clean latents after the last step; None if the scheduler has none."""
        self.has_called_denoiser = False
        self.call: DenoiserCall | None = None
        """The call at which the run is parked; None at the end of a step."""
        self.result: Any = None
        self.error: Exception | None = None
        self.is_over = False
        """Finished, failed or aborted."""
        self._is_aborted = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, name="pipeline", daemon=True)
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @property
    def is_denoised(self) -> bool:
        """All steps are done; what remains is decoding."""
        return self.steps_done > 0 and self.steps_done == self.num_steps

    def resume(self) -> None:
        """Runs the pipeline until it parks or is over."""
        if self._thread.ident is None:
            _runs[self._thread] = self
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        if self.is_over:
            self._thread.join()

    def abort(self) -> None:
        """Ends the run where it is parked; nothing is decoded. Harmless if it is over."""
        if self.is_over:
            return
        self._is_aborted = True
        if self._thread.ident is None:
            self._end()
        else:
            while not self.is_over:  # a pipeline may have a `finally` that calls the denoiser
                self.resume()

    def denoise(self, call: DenoiserCall) -> Any:
        """Parks at the call and returns its result. Must be called in the run's own thread.

        Raises `ValueError` before the first call if the scheduler has no schedule of the requested length."""
        scheduler = self.pipe.scheduler
        # One step with `shift_terminal` divides by zero.
        if not (self.has_called_denoiser or torch.isfinite(scheduler.timesteps).all()):
            raise ValueError(
                f"{type(scheduler).__name__} has no schedule of {len(scheduler.timesteps)} steps"
            )
        self.call = call
        self.has_called_denoiser = True
        self._park()
        if call.error is not None:
            raise call.error
        return call.result

    def _park(self) -> None:
        if self._is_aborted:
            raise AbortedError
        self._back.release()
        self._go.acquire()
        if self._is_aborted:
            raise AbortedError

    def _scheduler_step(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the scheduler's `step`, and parks after it."""
        if self.clean_latents is not None:
            return (self.clean_latents,)
        given = self._step_signature.bind(*args, **kwargs).arguments
        result = self._step(*args, **kwargs)
        self.estimate = _estimate(self.pipe.scheduler, given, result)
        self.latents = result[0]
        self.steps_done += 1
        self.num_steps = getattr(self.pipe, "num_timesteps", None)
        self.call = None
        self._park()
        return result

    def _main(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        try:
            with torch.inference_mode():
                self.result = self.pipe(**self.arguments)
        except AbortedError:
            pass
        except Exception as error:  # noqa: BLE001 - the outcome of the run
            self.error = error
        self._end()
        self._back.release()

    def _end(self) -> None:
        self.is_over = True
        self.call = self.estimate = self.cache_context = None
        # The scheduler refers to itself and to this run, and so would keep tensors until the garbage
        # collector comes.
        del self.pipe.scheduler.step
        self.pipe = None
        _runs.pop(self._thread, None)


_runs: dict[threading.Thread, PipelineRun] = {}


def run_of_this_thread() -> PipelineRun | None:
    """The run whose pipeline the current thread executes."""
    return _runs.get(threading.current_thread())


def _estimate(scheduler: Any, given: Mapping[str, Any], result: Any) -> Callable[[], torch.Tensor] | None:
    """Returns what computes the latents that the step expects at the end of all steps.

    Schedulers of flow matching predict the velocity, and others return the estimate with their result."""
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        sigma = scheduler.sigmas[scheduler.step_index - 1]
        velocity, sample = given["model_output"], given["sample"]
        return lambda: (sample.float() - sigma * velocity.float()).to(velocity.dtype)
    if len(result) > 1 and isinstance(result[1], torch.Tensor) and result[1].shape == result[0].shape:
        return lambda: result[1]
    return None
