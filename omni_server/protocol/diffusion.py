"""How a request to a diffusion stage carries more than its tokens."""

import msgspec
import numpy as np
import numpy.typing as npt

INPUT_KEY = "omni_input"
"""Key of `PoolingParams.extra_kwargs` whose value is the stage's encoded input, bytes."""

STREAMS_KEY = "omni_streams"
"""Key of `PoolingParams.extra_kwargs`: the number of active streams when this was sent, including its own.
Without the key the number is unknown: the batch waits for others."""


class StageResult(msgspec.Struct, frozen=True):
    """Input of a diffusion stage that continues another one's work: that stage's result and its own input."""

    payload: bytes
    """The input that the first stage received."""
    shape: tuple[int, ...]
    data: bytes
    """float32, little-endian, in C order."""


def encode_stage_result(payload: bytes, result: npt.NDArray[np.float32]) -> bytes:
    """Returns MessagePack bytes."""
    return msgspec.msgpack.encode(StageResult(payload, result.shape, result.astype("<f4").tobytes()))


def decode_stage_result(data: bytes) -> tuple[bytes, npt.NDArray[np.float32]]:
    """Returns the first stage's payload and its result. Raises `ValueError` for anything else."""
    try:
        message = msgspec.msgpack.decode(data, type=StageResult)
        return message.payload, np.frombuffer(message.data, "<f4").reshape(message.shape)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a stage's result: {error}") from error
