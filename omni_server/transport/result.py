"""How a diffusion stage reports that one request failed, without failing the engine.

vLLM's pooling path carries exactly one tensor per request and nothing else. Results are floating-point
tensors; a failure is its message in UTF-8 as a uint8 tensor, so that neither can be taken for the other.
"""

import torch

from omni_server.errors import CorruptDataError, StageError
from omni_server.protocol.corruption import Corruption, decode_corruption, encode_corruption

MAX_MESSAGE_BYTES = 4096


def encode_failure(failure: str | Corruption) -> torch.Tensor:
    """Returns a uint8 tensor [num_bytes] on the CPU; long messages are truncated."""
    message = encode_corruption(failure) if isinstance(failure, Corruption) else failure
    return torch.frombuffer(bytearray(message.encode()[:MAX_MESSAGE_BYTES] or b"failed"), dtype=torch.uint8)


def decode_result(result: torch.Tensor, stage: str) -> torch.Tensor:
    """Returns `result` itself. Raises `StageError` if it is a failure of the stage named `stage`, and
    `CorruptDataError` if it reports corrupt data or is not a result."""
    if result.dtype == torch.uint8:
        message = bytes(result.numpy()).decode(errors="replace")
        corruption = decode_corruption(message)
        if corruption is not None:
            raise CorruptDataError(stage, corruption.kind, corruption.detail)
        raise StageError(stage, message)
    if not result.is_floating_point():
        raise CorruptDataError(
            stage, "shape", f"a result of type {result.dtype}; results are floating tensors"
        )
    return result
