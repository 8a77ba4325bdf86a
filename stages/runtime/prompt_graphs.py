"""Steps with prompts in them as CUDA graphs of whole steps.

vLLM's default mode, FULL_AND_PIECEWISE, has graphs of whole steps where every request decodes one token, and for all
others graphs of the pieces between attention layers. In between the host calls attention for each layer: a short prompt
takes it 9 ms, of which the GPU needs 5, and at 64 callers a dozen such steps in a row keep the GPU waiting. vLLM's mode
FULL has graphs of whole steps of any kind, but none for decoding alone, which our kernels are made for. No member of
`CUDAGraphMode` has both, and the manager's class is not to be chosen either: so the manager that vLLM has just made is
told to capture whole steps where it would have captured pieces.
"""

from dataclasses import replace

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import get_attn_cg_support
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def use_prompt_graphs(runner: GPUModelRunner) -> None:
    """To be called before graphs are captured. Changes nothing in another mode, without graphs, and under an attention
    backend that can only be captured for decoding."""
    manager = runner.cudagraph_manager
    if manager is None or not manager.needs_capture():
        return
    support = get_attn_cg_support(runner.attn_groups, runner.vllm_config)
    if support.min_cg_support == AttentionCGSupport.ALWAYS:
        capture_whole_prompts(manager)


def capture_whole_prompts(manager: CudaGraphManager) -> None:
    """In place of each graph of pieces, one of a whole step with as many tokens, of as many requests as there can be.
    Decoding keeps its own."""
    if manager.cudagraph_mode != CUDAGraphMode.FULL_AND_PIECEWISE or manager.use_breakable_cg:
        return
    all_pieces = manager._capture_descs.pop(CUDAGraphMode.PIECEWISE, [])
    whole = {pieces: _whole(pieces, manager.max_num_reqs) for pieces in all_pieces}
    every = [*manager._capture_descs.get(CUDAGraphMode.FULL, ()), *whole.values()]
    # The largest first, as vLLM has it: the others then find their memory in what those have taken.
    manager._capture_descs[CUDAGraphMode.FULL] = sorted(every, key=lambda graph: graph.num_tokens, reverse=True)
    for candidates in manager._candidates.values():
        candidates[:] = [whole.get(graph, graph) for graph in candidates]


def _whole(pieces: BatchExecutionDescriptor, max_num_reqs: int) -> BatchExecutionDescriptor:
    """As vLLM describes a graph of mode FULL: captured with so many requests, replayed with as many or fewer."""
    return replace(pieces, cg_mode=CUDAGraphMode.FULL, num_reqs=min(pieces.num_tokens, max_num_reqs))
