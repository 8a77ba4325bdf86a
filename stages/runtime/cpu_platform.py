"""vLLM's platform of CPUs, for engines that are forked from a process that has set it up."""

from functools import cache

from vllm.platforms.cpu import CpuPlatform


class ForkedCpuPlatform(CpuPlatform):
    """vLLM's replaces Triton's kernels in each worker. It searches all modules for them, which takes 40 % of
    the CPU time of a small engine's start. What the fork server has replaced is inherited."""

    @classmethod
    @cache
    def register_triton_kernel_overrides(cls) -> None:
        super().register_triton_kernel_overrides()
