"""How a diffusion stage reports that one request failed, without failing the engine.

vLLM's pooling path carries exactly one tensor per request and nothing else. Results are floating tensors; a failure is
its message in UTF-8 as a uint8 tensor, so that the two cannot be taken for each other, whatever their lengths.
"""

import torch

from omni_server.errors import StageError

MAX_MESSAGE_BYTES = 4096


def encode_failure(message: str) -> torch.Tensor:
    """uint8 tensor [num_bytes] on the CPU; long messages are cut."""
    return torch.frombuffer(bytearray(message.encode()[:MAX_MESSAGE_BYTES] or b"failed"), dtype=torch.uint8)


def decode_result(result: torch.Tensor, stage: str) -> torch.Tensor:
    """`result` itself, or `StageError` if it is a failure of the stage named `stage`."""
    if result.dtype == torch.uint8:
        raise StageError(stage, bytes(result.numpy()).decode(errors="replace"))
    if not result.is_floating_point():
        raise StageError(stage, f"sent a result of type {result.dtype}; results are floating tensors")
    return result
