"""CUDA graphs of whole steps for steps with prompts in them.

vLLM's default mode, FULL_AND_PIECEWISE, has graphs of whole steps where every request decodes one token, and
for all others graphs of the pieces between attention layers. There the host calls attention for each layer: a
short prompt takes it 9 ms, of which the GPU needs 5, and at 64 callers a dozen such steps in a row keep the
GPU waiting. vLLM's mode FULL has graphs of whole steps of any kind, but none for decoding alone, which our
kernels are made for; FULL_DECODE_ONLY has these and no others. No mode has both, so the runner gets one
manager of graphs that consists of two.
"""

from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import get_attn_cg_support
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class WholeStepGraphs(ModelCudaGraphManager):
    """Graphs of whole steps of any kind, and those of decoding alone, which are preferred."""

    def __init__(self, manager: ModelCudaGraphManager) -> None:
        """As `manager`, which has captured nothing yet, was made, but for the mode."""
        super().__init__(*_in_mode(manager, CUDAGraphMode.FULL))
        self.decode_graphs = ModelCudaGraphManager(*_in_mode(manager, CUDAGraphMode.FULL_DECODE_ONLY))

    def capture(self, *args: Any, **kwargs: Any) -> None:
        # The larger ones first: the others then find their memory in what those have taken.
        super().capture(*args, **kwargs)
        self.decode_graphs.capture(*args, **kwargs)

    def release_graphs(self) -> None:
        super().release_graphs()
        self.decode_graphs.release_graphs()

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        found: BatchExecutionDescriptor = self.decode_graphs.dispatch(*args, **kwargs)
        return found if found.cg_mode == CUDAGraphMode.FULL else super().dispatch(*args, **kwargs)

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        # Only graphs of decoding alone are for a certain number of tokens per request.
        if desc.uniform_token_count is not None:
            return self.decode_graphs.run_fullgraph(desc)
        return super().run_fullgraph(desc)


def _in_mode(manager: ModelCudaGraphManager, mode: CUDAGraphMode) -> tuple[Any, ...]:
    """Arguments for another manager like this one."""
    return manager.vllm_config, manager.device, mode, manager.decode_query_len, manager.lora_capture_cases


def use_prompt_graphs(runner: GPUModelRunner, *, is_profiling: bool) -> None:
    """Replace the manager of graphs that `runner` has just made with its caches, before anything is captured.

    Changes nothing in another mode than FULL_AND_PIECEWISE, and where the manager has more to do
    (microbatches, verified drafts of several lengths, fast prefill, breakable graphs); nor under an attention
    backend that can be captured for decoding only. While vLLM profiles the memory of graphs, from the largest
    ones of the manager, those of decoding alone are left out: they are smaller.
    """
    manager = runner.cudagraph_manager
    if (
        manager is None
        or not manager.needs_capture()
        or manager.cudagraph_mode != CUDAGraphMode.FULL_AND_PIECEWISE
        or manager.use_breakable_cg
        or manager.varlen_decode
        or manager.ubatch_runner is not None
        or runner.fast_prefill is not None
    ):
        return
    support = get_attn_cg_support(runner.attn_groups, runner.vllm_config)
    if support.min_cg_support == AttentionCGSupport.ALWAYS:
        runner.cudagraph_manager = (
            ModelCudaGraphManager(*_in_mode(manager, CUDAGraphMode.FULL))
            if is_profiling
            else WholeStepGraphs(manager)
        )
