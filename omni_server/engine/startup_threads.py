"""Threads of engine processes while they load weights."""

import contextlib
import os
from collections.abc import Iterator

from vllm.utils.torch_utils import OMP_NUM_THREADS_SET_BY_VLLM, startup_omp_num_threads


@contextlib.contextmanager
def shared_startup_threads(num_engines: int) -> Iterator[None]:
    """Every engine that is spawned inside gets its part of the cores for its start, and one thread afterwards.

    vLLM sets the same two variables around each spawn (`_configure_uniproc_startup_threads`), unless OMP_NUM_THREADS
    is set. Engines that are spawned side by side from threads of one process would take each other's variables
    away, and one that finds the number of threads without vLLM's mark keeps all of them while it serves. So they are
    set once around all spawns. An operator's own OMP_NUM_THREADS stays.
    """
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    variables = {"OMP_NUM_THREADS": str(startup_omp_num_threads(num_engines)), OMP_NUM_THREADS_SET_BY_VLLM: "1"}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
