"""Videos to sampled RGB frames, with OpenCV's FFmpeg backend. A sound track is not read."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import cv2
import numpy as np
import numpy.typing as npt
from cv2.typing import MatLike

from omni_server.errors import InvalidRequestError
from omni_server.media.limits import MediaLimits
from omni_server.types import VideoPart

_SAMPLE_FPS = 2.0
"""Frames taken per second, the default of the Qwen-Omni processors."""
_MIN_FRAMES = 4
"""Taken of a short video, if it has them; the processors' `min_frames`."""
_FRAME_FACTOR = 2
"""The vision encoders merge two frames to one: their `temporal_patch_size`."""
_MAX_FPS = 240.0
"""A header that claims more is not believed: streams without a rate declare their clock, 1000 Hz, instead."""
_MIN_DECODED = 0.9
"""Headers may count a few frames too many, since their number is often an estimate; a file cut short lacks more."""
_DECODER_THREADS = 2


@dataclass(frozen=True)
class _Timeline:
    num_frames: int
    fps: float


def decode_video(data: bytes, limits: MediaLimits) -> VideoPart:
    """Frames spread evenly over the video, about two per second, as `smart_nframes` of qwen-vl-utils chooses them.

    The number of frames is even and at least four where the video has so many, and at most
    `limits.max_video_frames`. `fps` of the result is the rate at which the frames were taken. Takes MP4, QuickTime,
    WebM, Matroska and AVI, as far as OpenCV has the codec. Raises `InvalidRequestError` with code `invalid_video`.
    """
    if len(data) > limits.max_bytes:
        raise _invalid(f"is larger than the {limits.max_bytes} bytes allowed")
    if not _has_known_container(data):
        raise _invalid("is not in a known format (mp4, mov, webm, mkv, avi)")
    try:
        timeline = _read_timeline(data, limits)
        indices = _sample_indices(timeline, limits)
        frames = _read_frames(data, indices, timeline, limits)
    except cv2.error as error:
        raise _invalid("is damaged") from error
    return VideoPart(frames, fps=len(indices) / timeline.num_frames * timeline.fps)


def _has_known_container(data: bytes) -> bool:
    """Also keeps playlists away from FFmpeg, which would open the files and URLs that they name."""
    is_avi = data[:4] == b"RIFF" and data[8:12] == b"AVI "
    return data[4:8] == b"ftyp" or data[:4] == b"\x1a\x45\xdf\xa3" or is_avi


@contextmanager
def _open(data: bytes) -> Iterator[cv2.VideoCapture]:
    # This frame keeps the stream alive until after `release`: OpenCV (5.0) does not, and crashes without it.
    stream = io.BytesIO(data)
    # The type stubs ask for an IStreamReader; any object with its `read` and `seek` serves.
    capture = cv2.VideoCapture(
        cast(cv2.IStreamReader, stream), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, _DECODER_THREADS]
    )
    try:
        if not capture.isOpened():
            raise _invalid("is damaged, incomplete or in a codec that this server cannot read")
        yield capture
    finally:
        capture.release()


def _read_timeline(data: bytes, limits: MediaLimits) -> _Timeline:
    """Length and rate as declared, or counted where the header does not say; refuses what is over the limits."""
    with _open(data) as capture:
        width = capture.get(cv2.CAP_PROP_FRAME_WIDTH)
        height = capture.get(cv2.CAP_PROP_FRAME_HEIGHT)
        if min(width, height) < 1:
            raise _invalid("declares no size")
        if width * height > limits.max_video_frame_pixels:
            raise _invalid(f"has more than the {limits.max_video_frame_pixels} pixels allowed")
        if max(width, height) > limits.max_aspect_ratio * min(width, height):
            raise _invalid(f"has an aspect ratio above {limits.max_aspect_ratio:g}")
        num_frames = capture.get(cv2.CAP_PROP_FRAME_COUNT)
        fps = capture.get(cv2.CAP_PROP_FPS)
        if num_frames >= 1 and 0 < fps <= _MAX_FPS:
            timeline = _Timeline(int(num_frames), fps)
        else:
            timeline = _count_frames(capture, limits)
    if timeline.num_frames > limits.max_video_seconds * timeline.fps:
        raise _invalid(f"is longer than {limits.max_video_seconds:g} s")
    return timeline


def _count_frames(capture: cv2.VideoCapture, limits: MediaLimits) -> _Timeline:
    """Decode all frames for their number and times, as live recordings of browsers (WebM) need it."""
    num_frames, last_s = 0, 0.0
    while last_s <= limits.max_video_seconds and num_frames <= limits.max_video_seconds * _MAX_FPS and capture.grab():
        num_frames += 1
        last_s = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000
    if num_frames == 0:
        raise _invalid("has no frame that can be decoded")
    # n frames span n - 1 intervals; a single one may last as long as it likes.
    fps = (num_frames - 1) / last_s if num_frames > 1 and last_s > 0 else _SAMPLE_FPS
    return _Timeline(num_frames, fps)


def _sample_indices(timeline: _Timeline, limits: MediaLimits) -> npt.NDArray[np.int64]:
    """Which frames to take, ascending."""
    wanted = timeline.num_frames / timeline.fps * _SAMPLE_FPS
    count = int(min(max(wanted, _MIN_FRAMES), limits.max_video_frames, timeline.num_frames))
    count = max(count - count % _FRAME_FACTOR, 1)
    return np.linspace(0, timeline.num_frames - 1, count).round().astype(np.int64)


def _read_frames(
    data: bytes, indices: npt.NDArray[np.int64], timeline: _Timeline, limits: MediaLimits
) -> npt.NDArray[np.uint8]:
    """The frames `indices`, RGB, [num_frames, height, width, 3], all of the first one's size or shrunk alike.

    Where the last of them are missing within the tolerance, the last one taken stands in for them.
    """
    frames: npt.NDArray[np.uint8] | None = None
    taken = position = 0
    with _open(data) as capture:
        while taken < len(indices) and capture.grab():
            if position == indices[taken]:
                decoded, frame = capture.retrieve()
                if not decoded:
                    raise _invalid("is damaged")
                if frames is None:
                    height, width = _target_size(frame.shape[0], frame.shape[1], len(indices), limits)
                    frames = np.empty((len(indices), height, width, 3), dtype=np.uint8)
                frames[taken] = _to_rgb(frame, frames.shape[1], frames.shape[2])
                taken += 1
            position += 1
    if frames is None or position < _MIN_DECODED * timeline.num_frames:
        raise _invalid("is incomplete: it has fewer frames than it declares")
    frames[taken:] = frames[taken - 1]
    return frames


def _target_size(height: int, width: int, num_frames: int, limits: MediaLimits) -> tuple[int, int]:
    """Height and width with which `num_frames` frames stay within `limits.max_video_pixels`."""
    scale = min(1.0, math.sqrt(limits.max_video_pixels / (height * width * num_frames)))
    return max(1, int(height * scale)), max(1, int(width * scale))


def _to_rgb(frame: MatLike, height: int, width: int) -> MatLike:
    if frame.shape[:2] != (height, width):
        frame = cv2.resize(frame, (width, height), interpolation=cv2.INTER_AREA)
    return cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)


def _invalid(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"The video {what}.", code="invalid_video")
