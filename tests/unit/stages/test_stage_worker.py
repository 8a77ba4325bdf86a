"""A stage's share of a GPU, with a simulated device: what is computed, whatever other processes do
meanwhile."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode, CUDAGraphMode

from omni_server.engine.start_progress import StartProgress
from omni_server.errors import ConfigError
from omni_server.protocol.device_memory import OUTSIDE_TORCH_BYTES, slack_bytes
from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.runtime import engine_start
from stages.runtime.memory import GRAPH_BYTES
from stages.runtime.stage_worker import StageWorkerMixin

GIB = 1 << 30
TOTAL = 80 * GIB
SHARE = 36 * GIB
WEIGHTS = 18 * GIB
ACTIVATIONS = 3 * GIB
GRAPHS = 1 * GIB
SLACK = 3 * GIB // 2
CAPTURE_SIZES = [1, 2, 4, 8]


class Device:
    """One GPU and torch's allocator of the process under test; `others` is what other processes take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others = 0
        self.reserved = 0
        self.peak_reserved = 0
        self.peak_allocated = 0
        self.fraction: float | None = None
        for name, function in {
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device: self.reset_peaks(),
            "memory_stats": lambda device: self.stats(),
            "mem_get_info": lambda device: (TOTAL - self.others - self.reserved, TOTAL),
            "set_per_process_memory_fraction": lambda fraction, device: setattr(self, "fraction", fraction),
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def reset_peaks(self) -> None:
        self.peak_reserved = self.peak_allocated = self.reserved

    def take(self, resident: int, transient: int = 0) -> None:
        """Allocate `resident` bytes for good and `transient` for a moment."""
        self.reserved += resident
        self.peak_reserved = max(self.peak_reserved, self.reserved + transient)
        self.peak_allocated = max(self.peak_allocated, self.reserved + transient)

    def stats(self) -> dict[str, int]:
        return {
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.peak_reserved,
            "allocated_bytes.all.current": self.reserved,
            "allocated_bytes.all.peak": self.peak_allocated,
        }


class FakeRunner:
    def __init__(self, device: Device) -> None:
        self._device = device

    def profile_cudagraph_memory(self) -> int:
        self._device.take(0, GRAPHS)
        return -7 * GIB  # vLLM's figure, while another process takes memory


class FakeWorker:
    """Stands for vLLM's GPU worker: what it allocates, and which of its paths it takes."""

    def __init__(
        self, device: Device, *, kv_cache_memory_bytes: int | None, graphs: bool, config: Any
    ) -> None:
        self._memory = device
        self.rank = 0
        self.requested_memory = SHARE
        self.vllm_config: Any = SimpleNamespace(
            additional_config=config,
            model_config=SimpleNamespace(is_multimodal_model=True),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
            cache_config=SimpleNamespace(kv_cache_memory_bytes=kv_cache_memory_bytes),
            compilation_config=SimpleNamespace(
                mode=CompilationMode.VLLM_COMPILE if graphs else CompilationMode.NONE,
                cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE if graphs else CUDAGraphMode.NONE,
                cudagraph_capture_sizes=CAPTURE_SIZES,
            ),
        )

    def init_device(self) -> None:
        self.device = torch.device("cuda:0")
        self.model_runner = FakeRunner(self._memory)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self._memory.take(WEIGHTS)

    def determine_available_memory(self) -> int:
        size: int | None = self.vllm_config.cache_config.kv_cache_memory_bytes
        assert size is not None, "vLLM would measure the device's free memory"
        self._memory.take(0, ACTIVATIONS)
        self._memory.others += 9 * GIB  # another stage loads its weights
        return size

    def compile_or_warm_up_model(self) -> str:
        return "warm"

    def _scoped_allocator_max_split(self, max_split_size_mb: int) -> Any:
        return pytest.MonkeyPatch.context()


class StageWorker(StageWorkerMixin, FakeWorker):
    runner_mixin = FakeRunner


Start = Callable[..., tuple[Device, StageWorker]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """A worker on a device of its own, up to loaded weights."""
    monkeypatch.setattr(engine_start, "end_with_parent", lambda: None)

    def started(
        *, kv_cache_memory_bytes: int | None = None, graphs: bool = True, config: Any = None
    ) -> tuple[Device, StageWorker]:
        device = Device(monkeypatch)
        worker = StageWorker(
            device, kv_cache_memory_bytes=kv_cache_memory_bytes, graphs=graphs, config=config
        )
        worker.init_device()
        worker.load_model()
        return device, worker

    return started


def test_the_kv_cache_gets_what_the_stage_itself_leaves_of_its_share(start: Start) -> None:
    _, worker = start()
    graphs = GRAPHS + 2 * len(CAPTURE_SIZES) * GRAPH_BYTES
    left = SHARE - OUTSIDE_TORCH_BYTES - SLACK - WEIGHTS - ACTIVATIONS - graphs
    assert worker.determine_available_memory() == left


def test_slack_is_smaller_only_where_steps_are_short_and_no_encoder_runs() -> None:
    assert {slack_bytes(tokens, encodes_media=True) for tokens in (512, 8192, 16384)} == {SLACK}
    assert slack_bytes(8192, encodes_media=False) == slack_bytes(16384, encodes_media=False) == SLACK
    assert slack_bytes(1024, encodes_media=False) == 5 * GIB // 8


def test_without_graphs_nothing_is_set_aside_for_them(start: Start) -> None:
    _, worker = start(graphs=False)
    left = SHARE - OUTSIDE_TORCH_BYTES - SLACK - WEIGHTS - ACTIVATIONS
    assert worker.determine_available_memory() == left


def test_a_size_that_the_config_names_is_taken(start: Start) -> None:
    _, worker = start(kv_cache_memory_bytes=5 * GIB)
    assert worker.determine_available_memory() == 5 * GIB
    assert worker.vllm_config.cache_config.kv_cache_memory_bytes == 5 * GIB


def test_torch_is_held_to_the_share_less_what_it_does_not_count(start: Start) -> None:
    device, _ = start()
    assert device.fraction == pytest.approx((SHARE - OUTSIDE_TORCH_BYTES) / TOTAL)


def test_a_share_that_leaves_no_kv_cache_is_refused_with_the_sum(start: Start) -> None:
    device, worker = start()
    device.take(14 * GIB)
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization is too small.*38\.7 GB = -\d.*34\.4 weights"
    ):
        worker.determine_available_memory()


def test_a_share_smaller_than_a_cuda_context_is_refused(start: Start) -> None:
    device, worker = start()
    worker.requested_memory = GIB // 2
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization gives this stage 0\.54 GB"):
        worker.determine_available_memory()
    assert device.reserved == WEIGHTS


def test_another_program_on_the_device_is_told(start: Start) -> None:
    device, worker = start()
    device.others = 45 * GIB
    with pytest.raises(ConfigError, match="another program uses it"):
        worker.determine_available_memory()


@pytest.mark.parametrize(("is_low", "variable"), [(True, "1"), (False, None)])
def test_a_stage_of_low_priority_tells_the_multi_process_service(
    start: Start, monkeypatch: pytest.MonkeyPatch, is_low: bool, variable: str | None
) -> None:
    monkeypatch.delenv("CUDA_MPS_CLIENT_PRIORITY", raising=False)
    start(config=StageRuntimeConfig("model", has_low_gpu_priority=is_low))
    assert os.environ.get("CUDA_MPS_CLIENT_PRIORITY") == variable
    monkeypatch.delenv("CUDA_MPS_CLIENT_PRIORITY", raising=False)


async def test_a_start_is_reported_step_by_step(start: Start) -> None:
    lines: list[str] = []
    with StartProgress(lines.append) as progress:
        _, worker = start(config=StageRuntimeConfig("folder", progress=progress.began("thinker")))
        worker.determine_available_memory()
        assert worker.compile_or_warm_up_model() == "warm"
        progress.is_ready("thinker")

    assert [line.partition(" after")[0] for line in lines] == [
        "thinker: starting",
        "thinker: loading weights",
        "thinker: weights loaded",
        "thinker: compiling",
        "thinker: 38.7 GB = 12.3 KV cache + 19.3 weights and buffers + 3.2 activations "
        "+ 1.1 CUDA graphs + 2.7 reserve",
        "thinker: capturing CUDA graphs",
        "thinker: ready",
    ]
    assert "after" in lines[2]


async def test_one_rank_reports_for_all(start: Start) -> None:
    lines: list[str] = []
    with StartProgress(lines.append) as progress:
        _, worker = start(config=StageRuntimeConfig("folder", progress=progress.began("thinker")))
        worker.rank = 1
        worker.init_device()
        worker.load_model()
        progress.is_ready("thinker")

    assert [line for line in lines if "loading" in line] == ["thinker: loading weights"]
