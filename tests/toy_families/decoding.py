"""NumPy versions of the toy decoders, which give tests the expected results."""

import hashlib

import numpy as np
import numpy.typing as npt

SAMPLES_PER_FRAME = 1280
SAMPLE_RATE_HZ = 16_000


def waveform(codes: npt.NDArray[np.int64], first_frame: int, voice: str) -> npt.NDArray[np.float32]:
    """A chord of one tone per codebook, `[num_frames * 1280]`. `codes` `[num_frames, 4]` count from 0;
    `first_frame` continues the tones of the previous window."""
    base = 110.0 if voice == "Low" else 220.0
    samples = np.arange(len(codes) * SAMPLES_PER_FRAME) + first_frame * SAMPLES_PER_FRAME
    hertz = base * 2 ** (np.repeat(codes, SAMPLES_PER_FRAME, axis=0) / 24)
    tones = np.sin(2 * np.pi * hertz * samples[:, None] / SAMPLE_RATE_HZ).astype(np.float32)
    chord: npt.NDArray[np.float32] = (0.2 * tones.mean(axis=1)).astype(np.float32)
    return chord


def render(prompt: str, width: int, height: int, seed: int) -> npt.NDArray[np.float32]:
    """An image of random pixels, `[height, width, 3]` in [0, 1]."""
    digest = hashlib.sha256(f"{seed} {prompt}".encode()).digest()
    return np.random.default_rng(list(digest)).random((height, width, 3), np.float32)
