"""How a diffusion stage reports that one request failed, without failing the engine.

vLLM's pooling path carries exactly one tensor per request and nothing else. Results are floating-point
tensors; a failure is its message in UTF-8 as a uint8 tensor, so that neither can be taken for the other.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from omni_server.errors import CorruptDataError, InvalidRequestError, StageError
from omni_server.protocol.corruption import Corruption, decode_corruption, encode_corruption

MAX_MESSAGE_BYTES = 4096
_REFUSED = "omni_refused "


@dataclass(frozen=True)
class Refusal:
    """An error in the request that only the stage can find."""

    code: Literal["invalid_value", "moderation_blocked"]
    """Of the error that the caller gets. OpenAI uses the latter for what a safety checker rejects."""
    message: str


Failure = str | Corruption | Refusal
"""Why a request has no result. A `str` is the message of an internal error."""


def encode_failure(failure: Failure) -> torch.Tensor:
    """Returns a uint8 tensor [num_bytes] on the CPU; long messages are truncated."""
    match failure:
        case Corruption():
            message = encode_corruption(failure)
        case Refusal():
            message = f"{_REFUSED}{failure.code} {failure.message}"
        case _:
            message = failure
    return torch.frombuffer(bytearray(message.encode()[:MAX_MESSAGE_BYTES] or b"failed"), dtype=torch.uint8)


def decode_result(result: torch.Tensor, stage: str) -> torch.Tensor:
    """Returns `result` itself. Raises `StageError` if it is a failure of the stage named `stage`,
    `CorruptDataError` if it reports corrupt data or is not a result, and `InvalidRequestError` if the stage
    refused the request."""
    if result.dtype == torch.uint8:
        message = bytes(result.numpy()).decode(errors="replace")
        corruption = decode_corruption(message)
        if corruption is not None:
            raise CorruptDataError(stage, corruption.kind, corruption.detail)
        if message.startswith(_REFUSED):
            code, _, reason = message.removeprefix(_REFUSED).partition(" ")
            raise InvalidRequestError(reason, code=code)
        raise StageError(stage, message)
    if not result.is_floating_point():
        raise CorruptDataError(
            stage, "shape", f"a result of type {result.dtype}; results are floating tensors"
        )
    return result
