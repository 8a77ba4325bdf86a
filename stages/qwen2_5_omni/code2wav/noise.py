"""Gaussian noise of a speech stream, addressed by absolute mel frame.

The reference draws the noise of a whole answer from the global generator. The windows of a stream overlap and
are computed in any order, so here a row depends only on (seed, frame) and is the same in every window.
"""

import numpy as np
import numpy.typing as npt

FRAMES_PER_DRAW = 24
"""Frames per key of the counter-based generator."""


def noise_frames(seed: int, first_frame: int, num_frames: int, mel_dim: int) -> npt.NDArray[np.float32]:
    """Rows `first_frame` to `first_frame + num_frames` of a stream's noise, float32 [num_frames, mel_dim].

    Computed on the CPU with Philox-4x64 (Salmon et al. 2011) keyed by (seed, frame // 24), whose raw stream
    NumPy guarantees to keep, and the Box-Muller transform in float64, so it does not depend on the device.
    `seed` is 0 to 2**64 - 1.
    """
    first_draw, offset = divmod(first_frame, FRAMES_PER_DRAW)
    num_draws = -(-(offset + num_frames) // FRAMES_PER_DRAW)
    draws = [_draw(seed, first_draw + i, mel_dim) for i in range(num_draws)]
    return np.concatenate([np.empty((0, mel_dim), np.float32), *draws])[offset : offset + num_frames]


def _draw(seed: int, index: int, mel_dim: int) -> npt.NDArray[np.float32]:
    key = np.array([seed, index], dtype=np.uint64)
    num_pairs = -(-FRAMES_PER_DRAW * mel_dim // 2)
    raw = np.random.Philox(key=key).random_raw(2 * num_pairs)
    # In (0, 1), so the log is finite.
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(uniform[:num_pairs]))
    angle = 2.0 * np.pi * uniform[num_pairs:]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return normal[: FRAMES_PER_DRAW * mel_dim].astype(np.float32).reshape(FRAMES_PER_DRAW, mel_dim)
