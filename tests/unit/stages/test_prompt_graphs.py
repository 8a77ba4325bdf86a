"""Whole steps with prompts are captured and found where vLLM would capture pieces; decoding keeps its own
graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from stages.runtime import prompt_graphs
from stages.runtime.prompt_graphs import WholeStepGraphs, use_prompt_graphs

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 512]
MAX_NUM_REQS = 32


class Runner:
    """As vLLM's is when its caches have been made: with vLLM's own manager of graphs, and without a
    device."""

    def __init__(self, mode: CUDAGraphMode, support: AttentionCGSupport, **manager: Any) -> None:
        self.vllm_config: Any = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=MAX_NUM_REQS),
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=SIZES[-1]
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=None,
        )
        self.attn_groups = support
        self.fast_prefill = None
        self.cudagraph_manager: Any = ModelCudaGraphManager(
            self.vllm_config, torch.device("cpu"), mode, decode_query_len=1, **manager
        )

    def capture(self) -> "Runner":
        self.cudagraph_manager.capture(None, None, None, None, None, [], None)
        return self

    def found(self, num_reqs: int, num_tokens: int) -> BatchExecutionDescriptor:
        return self.cudagraph_manager.dispatch(num_reqs, num_tokens, 1 if num_reqs == num_tokens else None, 0)


Captured = list[BatchExecutionDescriptor]


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> Captured:
    """What has been captured, in this order; a graph's replay is its number of tokens."""
    graphs: Captured = []

    def capture(manager: CudaGraphManager, *args: Any) -> None:
        for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            some = manager._capture_descs.get(mode, [])
            graphs.extend(some)
            manager.graphs |= {graph: graph for graph in some}
        manager._graphs_captured = True

    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    monkeypatch.setattr(
        cudagraph_utils, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None)
    )
    monkeypatch.setattr(cudagraph_utils, "has_compiled_submodule", lambda model: True)
    monkeypatch.setattr(CudaGraphManager, "capture", capture)
    monkeypatch.setattr(CudaGraphManager, "run_fullgraph", lambda manager, graph: manager.graphs[graph])
    monkeypatch.setattr(
        prompt_graphs, "get_attn_cg_support", lambda groups, config: SimpleNamespace(min_cg_support=groups)
    )
    return graphs


def runner(
    mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE,
    support: AttentionCGSupport = AttentionCGSupport.ALWAYS,
    *,
    is_profiling: bool = False,
    **manager: Any,
) -> Runner:
    made = Runner(mode, support, **manager)
    use_prompt_graphs(made, is_profiling=is_profiling)
    return made


@pytest.mark.parametrize(
    ("num_reqs", "num_tokens", "size"),
    [(1, 2, 2), (1, 3, 4), (1, 100, 128), (31, 130, 512), (32, 512, 512), (2, 33, 64)],
)
def test_steps_with_prompts_find_a_graph_of_a_whole_step_that_has_room(
    num_reqs: int, num_tokens: int, size: int, captured: Captured
) -> None:
    vllms = Runner(CUDAGraphMode.FULL_AND_PIECEWISE, AttentionCGSupport.ALWAYS).capture()
    assert vllms.found(num_reqs, num_tokens).cg_mode == CUDAGraphMode.PIECEWISE
    captured.clear()
    graph = runner().capture().found(num_reqs, num_tokens)
    assert graph.cg_mode == CUDAGraphMode.FULL
    assert (graph.num_tokens, graph.num_reqs) == (size, min(size, MAX_NUM_REQS))
    assert graph in captured


@pytest.mark.parametrize("num_reqs", [1, 2, 3, 8, 17, 32])
def test_decoding_finds_the_graphs_that_it_finds_in_vllms_own_manager(
    num_reqs: int, captured: Captured
) -> None:
    vllms = Runner(CUDAGraphMode.FULL_AND_PIECEWISE, AttentionCGSupport.ALWAYS).capture()
    captured.clear()
    graph = runner().capture().found(num_reqs, num_reqs)
    assert graph == vllms.found(num_reqs, num_reqs)
    assert graph.uniform_token_count == 1
    assert graph in captured


@pytest.mark.parametrize(("num_reqs", "num_tokens"), [(3, 3), (3, 100)])
def test_a_graph_is_replayed_by_the_manager_that_has_captured_it(num_reqs: int, num_tokens: int) -> None:
    made = runner().capture()
    manager, graph = made.cudagraph_manager, made.found(num_reqs, num_tokens)
    manager.hidden_states = torch.full((SIZES[-1], 1), 1.0)
    manager.decode_graphs.hidden_states = torch.full((MAX_NUM_REQS, 1), 2.0)
    expected = torch.full((graph.num_tokens, 1), 2.0 if num_reqs == num_tokens else 1.0)
    assert torch.equal(manager.run_fullgraph(graph), expected)


def test_longer_prompts_than_any_graph_still_run_without_one() -> None:
    assert runner().capture().found(1, SIZES[-1] + 1).cg_mode == CUDAGraphMode.NONE


def test_released_graphs_are_captured_again() -> None:
    made = runner().capture()
    manager = made.cudagraph_manager
    manager.release_graphs()
    assert made.found(3, 3).cg_mode == CUDAGraphMode.NONE
    assert manager.needs_capture()
    made.capture()
    assert made.found(3, 3).uniform_token_count == 1


@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL]
)
def test_other_modes_are_left_as_they_are(mode: CUDAGraphMode) -> None:
    assert not isinstance(runner(mode).cudagraph_manager, WholeStepGraphs)


def test_backends_that_are_captured_for_decoding_only_are_left_to_vllm() -> None:
    made = runner(support=AttentionCGSupport.UNIFORM_BATCH)
    assert not isinstance(made.cudagraph_manager, WholeStepGraphs)


def test_drafts_of_several_lengths_are_left_to_vllm() -> None:
    assert not isinstance(runner(varlen_decode=True).cudagraph_manager, WholeStepGraphs)
