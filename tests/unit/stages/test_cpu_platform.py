"""vLLM runs on the platform of this server, whose engines inherit what the fork server has set up."""

import pytest
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform


def test_kernels_are_replaced_once_in_a_process_and_those_forked_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[type] = []
    monkeypatch.setattr(CpuPlatform, "register_triton_kernel_overrides", classmethod(calls.append))
    current_platform.register_triton_kernel_overrides.cache_clear()
    current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides()
    assert calls == [type(current_platform)]
