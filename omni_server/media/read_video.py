"""Loaded by `limited_program`: samples frames of a video with OpenCV's FFmpeg backend.

The arguments are the fields of `_Limits`, from `MediaLimits`, in order. The output is the number of frames,
their height and width, and the rate at which they were sampled (`HEADER`), then the frames, RGB, uint8. The
exit status is 0 or one of those below.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple, cast

import cv2
import numpy as np
import numpy.typing as npt
from cv2.typing import MatLike

HEADER = struct.Struct("=IIId")
UNREADABLE, DAMAGED, NO_SIZE, TOO_LARGE, EXTREME_RATIO, NO_FRAME, TOO_LONG, INCOMPLETE = range(3, 11)
"""The first is also `limited_program`'s, if memory runs out."""

_SAMPLE_FPS = 2.0
"""Frames sampled per second, the default of the Qwen-Omni processors."""
_MIN_FRAMES = 4
"""For a short video, if it has them; the processors' `min_frames`."""
_FRAME_FACTOR = 2
"""Vision encoders merge two frames into one: their `temporal_patch_size`."""
_MAX_FPS = 240.0
"""A header with more is not trusted: streams without a rate declare their clock, 1000 Hz, instead."""
_MIN_DECODED = 0.9
"""Headers often declare a few frames too many, as an estimate; a truncated file lacks more."""
_DECODER_THREADS = 2
"""Up to this many CPU seconds per second."""


class _Limits(NamedTuple):
    max_video_frame_pixels: int
    max_aspect_ratio: float
    max_video_seconds: float
    max_video_frames: int
    max_video_pixels: int


class _Timeline(NamedTuple):
    num_frames: int
    fps: float


class _Refused(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


def read(file: BinaryIO, output: BinaryIO, arguments: Sequence[str]) -> int:
    frame_pixels, ratio, seconds, frames, pixels = arguments
    limits = _Limits(int(frame_pixels), float(ratio), float(seconds), int(frames), int(pixels))
    cv2.setNumThreads(1)  # threads take address space; they do not change pixel values
    try:
        timeline = _read_timeline(file, limits)
        indices = _sample_indices(timeline, limits)
        _write_frames(file, indices, timeline, limits, output)
    except cv2.error:
        return DAMAGED
    except _Refused as refusal:
        return refusal.status
    return 0


@contextmanager
def _open(file: BinaryIO) -> Iterator[cv2.VideoCapture]:
    # The caller keeps the stream alive until after `release`: OpenCV (5.0) does not, and crashes without it.
    file.seek(0)
    # The type stubs ask for an IStreamReader; any object with its `read` and `seek` works.
    capture = cv2.VideoCapture(
        cast(cv2.IStreamReader, file), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, _DECODER_THREADS]
    )
    try:
        if not capture.isOpened():
            raise _Refused(UNREADABLE)
        yield capture
    finally:
        capture.release()


def _read_timeline(file: BinaryIO, limits: _Limits) -> _Timeline:
    """Returns the declared length and rate, else counts. Refuses videos beyond the limits."""
    with _open(file) as capture:
        width = capture.get(cv2.CAP_PROP_FRAME_WIDTH)
        height = capture.get(cv2.CAP_PROP_FRAME_HEIGHT)
        if min(width, height) < 1:
            raise _Refused(NO_SIZE)
        if width * height > limits.max_video_frame_pixels:
            raise _Refused(TOO_LARGE)
        if max(width, height) > limits.max_aspect_ratio * min(width, height):
            raise _Refused(EXTREME_RATIO)
        num_frames = capture.get(cv2.CAP_PROP_FRAME_COUNT)
        fps = capture.get(cv2.CAP_PROP_FPS)
        if num_frames >= 1 and 0 < fps <= _MAX_FPS:
            timeline = _Timeline(int(num_frames), fps)
        else:
            timeline = _count_frames(capture, limits)
    if timeline.num_frames > limits.max_video_seconds * timeline.fps:
        raise _Refused(TOO_LONG)
    return timeline


def _count_frames(capture: cv2.VideoCapture, limits: _Limits) -> _Timeline:
    """Decodes all frames to count and time them, as live browser recordings (WebM) require."""
    num_frames, last_s = 0, 0.0
    while (
        last_s <= limits.max_video_seconds
        and num_frames <= limits.max_video_seconds * _MAX_FPS
        and capture.grab()
    ):
        num_frames += 1
        last_s = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000
    if num_frames == 0:
        raise _Refused(NO_FRAME)
    # n frames span n - 1 intervals; the duration of a single one is arbitrary.
    fps = (num_frames - 1) / last_s if num_frames > 1 and last_s > 0 else _SAMPLE_FPS
    return _Timeline(num_frames, fps)


def _sample_indices(timeline: _Timeline, limits: _Limits) -> npt.NDArray[np.int64]:
    """Returns the frames to sample, ascending."""
    wanted = timeline.num_frames / timeline.fps * _SAMPLE_FPS
    count = int(min(max(wanted, _MIN_FRAMES), limits.max_video_frames, timeline.num_frames))
    count = max(count - count % _FRAME_FACTOR, 1)
    return np.linspace(0, timeline.num_frames - 1, count).round().astype(np.int64)


def _write_frames(
    file: BinaryIO, indices: npt.NDArray[np.int64], timeline: _Timeline, limits: _Limits, output: BinaryIO
) -> None:
    """Writes the frames `indices`, RGB, each [height, width, 3], in the first one's size or shrunk alike.

    If the last of them are missing within the tolerance, repeats the last one decoded.
    """
    taken = position = height = width = 0
    last: MatLike | None = None
    with _open(file) as capture:
        while taken < len(indices) and capture.grab():
            if position == indices[taken]:
                decoded, frame = capture.retrieve()
                if not decoded:
                    raise _Refused(DAMAGED)
                if last is None:
                    height, width = _target_size(frame.shape[0], frame.shape[1], len(indices), limits)
                    fps = len(indices) / timeline.num_frames * timeline.fps
                    output.write(HEADER.pack(len(indices), height, width, fps))
                last = _to_rgb(frame, height, width)
                output.write(last.data)
                taken += 1
            position += 1
    if last is None or position < _MIN_DECODED * timeline.num_frames:
        raise _Refused(INCOMPLETE)
    for _ in range(taken, len(indices)):
        output.write(last.data)


def _target_size(height: int, width: int, num_frames: int, limits: _Limits) -> tuple[int, int]:
    """Returns the size at which `num_frames` frames stay within `limits.max_video_pixels`."""
    scale = min(1.0, math.sqrt(limits.max_video_pixels / (height * width * num_frames)))
    return max(1, int(height * scale)), max(1, int(width * scale))


def _to_rgb(frame: MatLike, height: int, width: int) -> MatLike:
    if frame.shape[:2] != (height, width):
        frame = cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA)
    return cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
