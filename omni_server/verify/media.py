"""Sounds, pictures and videos computed from a formula: the same on every machine, and nobody's own."""

import numpy as np

from omni_server.types import AudioPart, ImagePart, VideoPart

AUDIO_RATE_HZ = 16_000
"""What the model's processor takes, so that nothing is resampled on either side."""


def rising_tone(seconds: float, start_hz: float) -> AudioPart:
    """Rises by 400 Hz each second, with a tremolo; float32 [16000 * seconds]."""
    t = np.arange(int(AUDIO_RATE_HZ * seconds)) / AUDIO_RATE_HZ
    tone = np.sin(2 * np.pi * (start_hz * t + 200 * t * t))
    return AudioPart((0.5 * tone * (0.6 + 0.4 * np.sin(6 * np.pi * t))).astype(np.float32), AUDIO_RATE_HZ)


def disc_on_tiles(height: int, width: int, *, offset: int = 0) -> ImagePart:
    """A red disc on a checkerboard, `offset` pixels right of its place; uint8 [height, width, 3]."""
    y, x = np.mgrid[0:height, 0:width]
    tile = ((x // 28 + y // 28) % 2).astype(bool)
    pixels = np.where(tile[..., None], (60, 90, 200), (180, 180, 180))
    disc = (y - height // 2) ** 2 + (x - width // 4 - offset) ** 2 < (height // 4) ** 2
    return ImagePart(np.where(disc[..., None], (220, 30, 30), pixels).astype(np.uint8))


def moving_disc(num_frames: int, height: int, width: int, fps: float) -> VideoPart:
    """The disc on its way to the right; uint8 [num_frames, height, width, 3]."""
    step = width // (2 * num_frames)
    frames = [disc_on_tiles(height, width, offset=step * i).pixels for i in range(num_frames)]
    return VideoPart(np.stack(frames), fps)
