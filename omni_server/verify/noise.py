"""The noise from which code2wav starts, found through the model family: the server knows no model."""

import importlib
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from omni_server.errors import ConfigError


class NoiseFrames(Protocol):
    def __call__(self, seed: int, first_frame: int, num_frames: int, mel_dim: int) -> npt.NDArray[np.float32]:
        """Rows of the utterance's noise from `first_frame` on, float32 [num_frames, mel_dim]."""
        ...


def family_noise(model_family: str) -> NoiseFrames:
    """`noise_frames` of `code2wav.noise` in the package of the stage config's `model_family`. Raises
    `ConfigError` if there is none."""
    module_name = model_family.partition(":")[0] + ".code2wav.noise"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        reason = f"there is no {module_name}"
        raise ConfigError(f"model_family '{model_family}' cannot be verified: {reason}") from error
    return cast(NoiseFrames, vars(module)["noise_frames"])
