"""Whole steps with prompts are captured and found where vLLM would capture pieces; decoding keeps its own graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from stages.runtime.prompt_graphs import capture_whole_prompts

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 512]
MAX_NUM_REQS = 32


def manager(mode: CUDAGraphMode) -> CudaGraphManager:
    """vLLM's own, as it is after the capture, without a device."""
    made: Any = object.__new__(CudaGraphManager)
    made.vllm_config = SimpleNamespace(speculative_config=None, cache_config=SimpleNamespace(use_kda_recoverssm=False))
    made.compilation_config = SimpleNamespace(cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=SIZES[-1])
    made.cudagraph_mode, made.max_num_reqs, made.decode_query_len = mode, MAX_NUM_REQS, 1
    made.varlen_decode, made.ubatch_runner, made.use_breakable_cg = False, None, False
    made.lora_capture_cases, made._lora_dispatch_map = [0], {}
    made._candidates, made._capture_descs, made._graphs_captured = {}, {}, True
    made._init_candidates()
    return made  # type: ignore[no-any-return]


def found(by: CudaGraphManager, num_reqs: int, num_tokens: int) -> BatchExecutionDescriptor:
    return by.dispatch(num_reqs, num_tokens, 1 if num_reqs == num_tokens else None, 0)


@pytest.mark.parametrize(
    ("num_reqs", "num_tokens", "size"),
    [(1, 2, 2), (1, 3, 4), (1, 100, 128), (31, 130, 512), (32, 512, 512), (2, 33, 64)],
)
def test_steps_with_prompts_find_a_graph_of_a_whole_step_that_has_room(
    num_reqs: int, num_tokens: int, size: int
) -> None:
    graphs = manager(CUDAGraphMode.FULL_AND_PIECEWISE)
    assert found(graphs, num_reqs, num_tokens).cg_mode == CUDAGraphMode.PIECEWISE
    capture_whole_prompts(graphs)
    graph = found(graphs, num_reqs, num_tokens)
    assert graph.cg_mode == CUDAGraphMode.FULL
    assert (graph.num_tokens, graph.num_reqs) == (size, min(size, MAX_NUM_REQS))
    assert graph in graphs._capture_descs[CUDAGraphMode.FULL]


@pytest.mark.parametrize("num_reqs", [1, 2, 3, 8, 17, 32])
def test_decoding_finds_the_graphs_that_it_found_before(num_reqs: int) -> None:
    graphs = manager(CUDAGraphMode.FULL_AND_PIECEWISE)
    before = found(graphs, num_reqs, num_reqs)
    assert before.uniform_token_count == 1
    capture_whole_prompts(graphs)
    assert found(graphs, num_reqs, num_reqs) == before
    assert before in graphs._capture_descs[CUDAGraphMode.FULL]


def test_longer_prompts_than_any_graph_still_run_without_one() -> None:
    graphs = manager(CUDAGraphMode.FULL_AND_PIECEWISE)
    capture_whole_prompts(graphs)
    assert found(graphs, 1, SIZES[-1] + 1).cg_mode == CUDAGraphMode.NONE


def test_no_pieces_are_captured_and_the_largest_graph_is_first() -> None:
    graphs = manager(CUDAGraphMode.FULL_AND_PIECEWISE)
    capture_whole_prompts(graphs)
    assert CUDAGraphMode.PIECEWISE not in graphs._capture_descs
    sizes = [graph.num_tokens for graph in graphs._capture_descs[CUDAGraphMode.FULL]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == len(SIZES) + sum(size <= MAX_NUM_REQS for size in SIZES)


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL])
def test_other_modes_are_left_as_they_are(mode: CUDAGraphMode) -> None:
    graphs = manager(mode)
    before = {name: list(some) for name, some in graphs._capture_descs.items()}
    capture_whole_prompts(graphs)
    assert graphs._capture_descs == before
