"""Memory that a stage sets aside of its share of a GPU, whatever the model. stages/runtime/memory.py has the
full sum."""

OUTSIDE_TORCH_BYTES = 1 << 30
"""CUDA context, kernel code, library handles and the driver's part of CUDA graphs. torch counts none of
these, and the driver reports only the sum over all processes."""

_ENCODER_SLACK_BYTES = 3 << 29
_STEP_SLACK_BYTES = 1 << 29
_TOKEN_SLACK_BYTES = 1 << 17


def slack_bytes(max_num_batched_tokens: int, *, encodes_media: bool) -> int:
    """Rounding and fragmentation in torch's allocator, and buffers that the first requests create.

    In a stage with encoders and steps of 8,192 tokens, 1 GiB was fragmented after audio and long prompts, and
    a step found no contiguous 0.6 GiB. Such a stage sets aside 1.5 GiB: encoder allocations do not shrink
    with the steps. Without encoders, fragments and allocations are as large as the steps: 0.5 GiB and 128 KiB
    per token, the same 1.5 GiB at 8,192 tokens. For shorter steps this is estimated, not measured.
    """
    steps = _STEP_SLACK_BYTES + _TOKEN_SLACK_BYTES * min(max_num_batched_tokens, 8192)
    return _ENCODER_SLACK_BYTES if encodes_media else steps
