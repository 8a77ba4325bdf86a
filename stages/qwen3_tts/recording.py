"""A recording of a voice, on its way to the voice encoder, and what comes back."""

import math

import msgspec
import numpy as np
import numpy.typing as npt

from omni_server.errors import InvalidRequestError
from omni_server.family import DiffusionPrompt
from omni_server.types import ClonedVoice
from stages.qwen_codec.codec_layout import NUM_CODEBOOKS

SAMPLES_PER_FRAME = 1920


class Recording(msgspec.Struct, frozen=True, array_like=True):
    samples: bytes
    """float32, mono, 24 kHz"""
    has_codes: bool
    """Whether its codes are wanted."""

    @property
    def num_frames(self) -> int:
        return math.ceil(len(self.samples) / 4 / SAMPLES_PER_FRAME)

    def prompt(self) -> DiffusionPrompt:
        return DiffusionPrompt((0,) * self.num_frames, msgspec.msgpack.encode(self))


def heard_voice(result: npt.NDArray[np.float32], width: int) -> ClonedVoice:
    """`result`: of `Qwen3TTSVoiceEncoder`."""
    return ClonedVoice(result[:width].tobytes(), result[width:].astype(np.int16).tobytes())


def check_voice(voice: ClonedVoice, width: int, codebook_size: int) -> None:
    """Raises `InvalidRequestError`."""
    if len(voice.vector) != 4 * width or not np.isfinite(np.frombuffer(voice.vector, np.float32)).all():
        raise InvalidRequestError(
            f"the vector of a voice has {width} finite numbers for this model", param="voice"
        )
    if bool(voice.frames) != bool(voice.text):
        raise InvalidRequestError("a voice has both codes and text, or neither", param="voice")
    is_whole = len(voice.frames) % (2 * NUM_CODEBOOKS) == 0
    if not is_whole or (np.frombuffer(voice.frames, np.uint16) >= codebook_size).any():
        raise InvalidRequestError("the codes of the voice are not those of this model", param="voice")
