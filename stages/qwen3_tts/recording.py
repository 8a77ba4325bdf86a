"""A recording on its way to the voice encoder, and the check of a cloned voice."""

import math

import msgspec
import numpy as np

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
