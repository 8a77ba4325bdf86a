"""What a stage sets aside of its share of a GPU, whatever the model. stages/runtime/memory.py has the whole sum."""

OUTSIDE_TORCH_BYTES = 1 << 30
"""CUDA context, code of kernels, handles of libraries and the driver's part of CUDA graphs. torch counts none of
these, and the driver tells a process only the sum over all processes."""

SLACK_BYTES = 3 << 29
"""Rounding and fragmentation inside torch's allocator, and buffers that come with the first requests. After audio in
and long prompts 1 GiB was in fragments, and a step of 8,192 tokens found no room for its 0.6 GiB in one piece."""
