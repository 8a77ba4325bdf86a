"""When a worker has warmed up, no step compiles a kernel of the predicted codes: in either generation of
vLLM's runner, without CUDA graphs."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm import SamplingParams
from vllm.config import CUDAGraphMode

from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.qwen_codec.code_predictor import CodePredictor, CodePredictorSizes
from stages.qwen_codec.decoder_kernels import KernelOperations
from stages.runtime import ar_runner_base, frame_predictor
from stages.runtime.ar_runner_v1 import ARModelRunnerV1Mixin
from stages.runtime.ar_runner_v2 import ARModelRunnerV2Mixin
from stages.runtime.code_sampling import Choose, CodeSampling
from stages.runtime.code_sampling_kernel import CodeKernel
from stages.runtime.stage_step import StepBatch
from stages.runtime.stage_worker import ARWorker, platform_worker_class
from tests.unit.stages import test_ar_runner_v1 as v1
from tests.unit.stages import test_ar_runner_v2 as v2
from tests.unit.stages.kernel_launches import noted_launches

MAX_NUM_SEQS, WIDTH = 40, 32
"""Rows of up to 80: more than the largest tile."""


class Talker(v2.Model):
    code_sampling = CodeSampling(temperature=1.0, top_k=20, top_p=0.9)

    def __init__(self) -> None:
        sizes = CodePredictorSizes(
            num_predicted=4,
            vocab_size=64,
            hidden_size=WIDTH,
            intermediate_size=48,
            num_layers=1,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rms_norm_eps=1e-6,
            rope_theta=10_000.0,
        )
        self.num_predicted = sizes.num_predicted
        self._predictor = CodePredictor(sizes, MAX_NUM_SEQS)
        self._predictor.operations = KernelOperations(sizes.rms_norm_eps)
        self._embedding = nn.Embedding(20, WIDTH)

    def predict(self, hidden: torch.Tensor, sampled: torch.Tensor, choose: Choose) -> torch.Tensor:
        codes: torch.Tensor = self._predictor(hidden, self._embedding(sampled), choose)
        return codes

    def embed_predicted(self, codes: torch.Tensor) -> torch.Tensor:
        return self._predictor.embed(codes)


class V1Base(v1.BaseRunner):
    def load_model(self) -> None:
        self.model = Talker()

    def get_model(self) -> Any:
        return self.model


class V2Base(v2.BaseRunner):
    model_class = Talker


@pytest.mark.parametrize(
    "classes", [(ARModelRunnerV1Mixin, V1Base), (ARModelRunnerV2Mixin, V2Base)], ids=["v1", "v2"]
)
def test_every_kernel_that_a_step_needs_is_compiled_when_the_worker_has_warmed_up(
    classes: tuple[type, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ar_runner_base, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(frame_predictor, "_chooser", CodeKernel)  # as on a GPU
    monkeypatch.setattr(platform_worker_class(), "compile_or_warm_up_model", lambda self: "of vLLM")
    config = v2.vllm_config(StageRuntimeConfig(model_dir="", num_predicted=4))
    config.model_config = SimpleNamespace(
        is_moe=False,
        uses_mrope=False,
        max_model_len=16,
        dtype=torch.float32,
        get_hidden_size=lambda: WIDTH,
    )
    config.scheduler_config = SimpleNamespace(max_num_seqs=MAX_NUM_SEQS)
    config.compilation_config = SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE)
    worker = object.__new__(ARWorker)
    worker.vllm_config = config
    worker.model_runner = type("Runner", classes, {})(config, torch.device("cpu"))
    worker.model_runner.load_model()

    with noted_launches(monkeypatch) as launches:
        assert worker.compile_or_warm_up_model() == "of vLLM"
    compiled = {launch.variant() for launch in launches}
    with noted_launches(monkeypatch) as launches:
        predict(worker.model_runner.code_history, range(1, MAX_NUM_SEQS + 1))

    assert {launch.variant() for launch in launches} == compiled


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
