"""Pictures and videos computed from a formula."""

from dataclasses import replace

import numpy as np

from omni_server.types import AudioPart, ImagePart, VideoPart


def tiles(height: int, width: int, inverted: bool = False) -> ImagePart:
    """A ramp in red and green under a checkerboard in blue."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 255 // width, y * 255 // height, (x // 16 + y // 16) % 2 * 200], -1).astype(
        np.uint8
    )
    return ImagePart(255 - pixels if inverted else pixels)


def sliding_tiles(frames: int, height: int, width: int, fps: float = 2.0) -> VideoPart:
    """The tiles, 5 pixels further right from frame to frame."""
    still = tiles(height, width).pixels
    return VideoPart(np.stack([np.roll(still, 5 * i, axis=1) for i in range(frames)]), fps)


def heard(video: VideoPart, audio: AudioPart) -> VideoPart:
    """`video` with `audio` as its track."""
    return replace(video, audio=audio)
