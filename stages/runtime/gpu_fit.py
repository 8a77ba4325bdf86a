"""Whether a GPU is one that the kernels of a decoding step are made for."""

import torch

_SHARED_MEMORY = 160 * 1024
"""Bytes of a multiprocessor's that their tiles take at most. A100, H100, H200 and B200 have them; others have less,
and there vLLM's own kernels run."""


def fits_decoding_kernels(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= _SHARED_MEMORY
