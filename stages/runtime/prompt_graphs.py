"""Full-step CUDA graphs for steps that include prompts.

vLLM's default mode, FULL_AND_PIECEWISE, has full-step graphs where every request decodes one token, and
piecewise graphs between attention layers for all other steps. In those the host calls attention for each
layer: a short prompt takes it 9 ms, of which the GPU needs 5 ms, and at 64 callers a dozen such steps in a
row keep the GPU waiting. vLLM's mode FULL has full-step graphs for any kind of step, but none for decode
alone, which our kernels need; FULL_DECODE_ONLY has only those. No mode has both, so the runner gets one graph
manager that combines two.
"""

from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import get_attn_cg_support
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class WholeStepGraphs(ModelCudaGraphManager):
    """Full-step graphs of any kind and decode-only graphs. Prefers the latter."""

    def __init__(self, manager: ModelCudaGraphManager) -> None:
        """Like `manager`, which has captured nothing yet, except for the mode."""
        super().__init__(*_in_mode(manager, CUDAGraphMode.FULL))
        self.decode_graphs = ModelCudaGraphManager(*_in_mode(manager, CUDAGraphMode.FULL_DECODE_ONLY))

    def capture(self, *args: Any, **kwargs: Any) -> None:
        # Capture the larger graphs first: the others then reuse the memory that those reserved.
        super().capture(*args, **kwargs)
        self.decode_graphs.capture(*args, **kwargs)

    def release_graphs(self) -> None:
        super().release_graphs()
        self.decode_graphs.release_graphs()

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        found: BatchExecutionDescriptor = self.decode_graphs.dispatch(*args, **kwargs)
        return found if found.cg_mode == CUDAGraphMode.FULL else super().dispatch(*args, **kwargs)

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        # Only decode-only graphs have a fixed number of tokens per request.
        if desc.uniform_token_count is not None:
            return self.decode_graphs.run_fullgraph(desc)
        return super().run_fullgraph(desc)


def _in_mode(manager: ModelCudaGraphManager, mode: CUDAGraphMode) -> tuple[Any, ...]:
    """Arguments for a manager in another mode."""
    return manager.vllm_config, manager.device, mode, manager.decode_query_len, manager.lora_capture_cases


def use_prompt_graphs(runner: GPUModelRunner, *, is_profiling: bool) -> None:
    """Replace the graph manager that `runner` has just created with its caches, before anything is captured.

    Does nothing in modes other than FULL_AND_PIECEWISE, if the manager has other duties (microbatches,
    verified drafts of several lengths, fast prefill, breakable graphs), or if the attention backend cannot be
    captured for all kinds of steps. While vLLM profiles graph memory, from the manager's largest graphs,
    decode-only graphs are left out: they are smaller.
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
