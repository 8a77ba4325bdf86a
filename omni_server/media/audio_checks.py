"""What sound is refused for, whatever file it comes in."""

import numpy as np
import numpy.typing as npt

from omni_server.errors import InvalidRequestError
from omni_server.media.limits import MediaLimits

_MIN_RATE_HZ = 4_000
_MAX_RATE_HZ = 192_000
_MAX_CHANNELS = 8


def check_stream(rate_hz: int, num_channels: int) -> None:
    """Raises `InvalidRequestError`, as all functions here do."""
    if not _MIN_RATE_HZ <= rate_hz <= _MAX_RATE_HZ:
        raise invalid_audio(f"has a sample rate outside {_MIN_RATE_HZ} to {_MAX_RATE_HZ} Hz")
    if num_channels < 1:
        raise invalid_audio("has no channel")
    if num_channels > _MAX_CHANNELS:
        raise invalid_audio(f"has more than {_MAX_CHANNELS} channels")


def check_length(num_samples: int, rate_hz: int, limits: MediaLimits) -> None:
    if num_samples > limits.max_audio_seconds * rate_hz:
        raise invalid_audio(f"is longer than {limits.max_audio_seconds:g} s")
    if num_samples > limits.max_audio_samples:
        raise invalid_audio(f"has more than {limits.max_audio_samples} samples at its rate of {rate_hz} Hz")


def mix_to_mono(block: npt.NDArray[np.float32], mono: npt.NDArray[np.float32]) -> None:
    """Clips `block` [num_samples, num_channels] to [-1, 1]; the mean of its channels goes into `mono` [num_samples]."""
    if not np.isfinite(block).all():
        raise invalid_audio("has samples that are not finite numbers")
    np.clip(block, -1.0, 1.0).mean(axis=1, dtype=np.float32, out=mono)


def invalid_audio(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"The audio {what}.", code="invalid_audio")


def damaged_audio() -> InvalidRequestError:
    return invalid_audio("is damaged or in a format that this server cannot read")
