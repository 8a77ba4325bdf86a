"""When a worker has warmed up, no step compiles a kernel of the predicted codes: in either generation of
vLLM's runner, without CUDA graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import CUDAGraphMode

from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.qwen_codec.decoder_kernels import KernelOperations
from stages.runtime import ar_runner_base, frame_predictor
from stages.runtime.code_sampling_kernel import CodeKernel
from stages.runtime.kernel_launch import CachedLaunch
from stages.runtime.stage_step import StepBatch
from stages.runtime.stage_worker import ARWorker, platform_worker_class
from tests.unit.stages.test_ar_runners import MIXINS, BaseRunner, vllm_config
from tests.unit.stages.test_predictor_graphs import WIDTH, Talker

MAX_NUM_SEQS = 40
"""Rows of up to 80: more than the largest tile."""


class KernelTalker(Talker):
    """As on a GPU."""

    def __init__(self) -> None:
        super().__init__(MAX_NUM_SEQS)
        self.predictor.operations = KernelOperations(1e-6)


def variant(launch: CachedLaunch, args: tuple[Any, ...], options: dict[str, int]) -> tuple[object, ...]:
    """Equal for two launches if the second one compiles nothing: see `CachedLaunch`."""

    def kind(param: Any, arg: torch.Tensor | float) -> object:
        if isinstance(arg, torch.Tensor):
            return arg.dtype, arg.data_ptr() % 16 == 0
        if param.is_constexpr:
            return arg
        if isinstance(arg, float) or param.do_not_specialize:
            return type(arg)
        return arg == 1, arg % 16 == 0

    return (launch.kernel, *map(kind, launch.kernel.params, args), *options.items())


@contextmanager
def noted_variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[object, ...]]]:
    """Of launches that are not made: results are left as they were, but ids are 0."""
    variants: set[tuple[object, ...]] = set()

    def note(
        launch: CachedLaunch, grid: tuple[int, int, int], *args: torch.Tensor | float, **options: int
    ) -> None:
        variants.add(variant(launch, args, options))
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.dtype == torch.int64:
                arg.zero_()

    with monkeypatch.context() as context:
        context.setattr(CachedLaunch, "__call__", note)
        yield variants


@MIXINS
def test_every_kernel_that_a_step_needs_is_compiled_when_the_worker_has_warmed_up(
    mixin: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ar_runner_base, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(frame_predictor, "_chooser", CodeKernel)  # as on a GPU
    monkeypatch.setattr(platform_worker_class(), "compile_or_warm_up_model", lambda self: "of vLLM")
    config = vllm_config(StageRuntimeConfig(model_dir="", num_predicted=4), max_num_seqs=MAX_NUM_SEQS)
    config.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE)
    worker = object.__new__(ARWorker)
    worker.vllm_config = config
    bases = (mixin, BaseRunner)
    worker.model_runner = type("Runner", bases, {"model_class": KernelTalker})(config, torch.device("cpu"))
    worker.model_runner.load_model()

    with noted_variants(monkeypatch) as compiled:
        assert worker.compile_or_warm_up_model() == "of vLLM"
    with noted_variants(monkeypatch) as needed:
        predict(worker.model_runner.code_history, range(1, MAX_NUM_SEQS + 1))

    assert needed == compiled


@torch.inference_mode()
def predict(history: frame_predictor.CodeHistory, batch_sizes: range) -> None:
    for size in batch_sizes:
        names = [str(index) for index in range(size)]
        history.add(names[-1], 1, SamplingParams(temperature=1.0))
        zeros, ones = np.zeros((2, size), np.int64), np.ones(size, np.int64)
        batch = StepBatch(names, zeros[0], ones, zeros[1])
        history.predict(
            torch.randn(size, WIDTH), torch.zeros(size, dtype=torch.int32), batch, ones.astype(bool)
        )
