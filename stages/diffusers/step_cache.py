"""Diffusers' step caches (`FirstBlockCache`), with a state for each request.

A step cache skips most of a denoiser when its first block's output changes little from one step to the next.
Diffusers keeps the state by the name of the call ("cond", "uncond"), as if there was one request at a time.
Here the names contain the request, and a state is freed with its request.
"""

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from stages.diffusers.pipeline_run import PipelineRun, run_of_this_thread


class StepCache:
    """The step cache of one denoiser, which is enabled already."""

    def __init__(self, denoiser: Any) -> None:
        self._denoiser = denoiser
        self._serials = itertools.count()
        self._names: WeakKeyDictionary[PipelineRun, str] = WeakKeyDictionary()
        self._enter = denoiser.cache_context
        reset = denoiser._reset_stateful_cache
        denoiser.cache_context = self._context

        def reset_unless_shared(*args: Any, **kwargs: Any) -> None:
            """A pipeline resets the states at its end, which would be those of all requests."""
            if run_of_this_thread() is None:
                reset(*args, **kwargs)

        denoiser._reset_stateful_cache = reset_unless_shared

    @contextmanager
    def _context(self, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        """In a request's thread the context is only remembered. It is entered where the call is run."""
        run = run_of_this_thread()
        if run is None:
            with self._enter(name, *args, **kwargs):
                yield
            return
        prefix = self._names.setdefault(run, f"{next(self._serials)}/")
        run.cache_context = functools.partial(self._enter, prefix + name, *args, **kwargs)
        try:
            yield
        finally:
            run.cache_context = None

    def forget(self, run: PipelineRun) -> None:
        prefix = self._names.pop(run, None)
        if prefix is None:
            return
        for states in self._states():
            for name in [name for name in states if name.startswith(prefix)]:
                del states[name]

    @property
    def num_states(self) -> int:
        return sum(map(len, self._states()))

    def _states(self) -> Iterator[dict[str, Any]]:
        for module in self._denoiser.modules():
            registry = vars(module).get("_diffusers_hook")
            for hook in () if registry is None else registry.hooks.values():
                for manager in vars(hook).values():
                    states = getattr(manager, "_state_cache", None)
                    if isinstance(states, dict):
                        yield states
