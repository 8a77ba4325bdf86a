"""Loaded by `limited_program`: samples frames of a video with FFmpeg.

The arguments are the demuxer's name and the fields of `_Limits`, from `MediaLimits`, in order. The output is
the number of frames, their height and width, and the rate at which they were sampled (`HEADER`), then the
frames, RGB, uint8. The exit status is 0 or one of those below.

FFmpeg reads untrusted files, so it opens nothing here: formats and codecs are those listed, references out of
a file are not followed, and the operating system denies this process further files and sockets.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple, NoReturn

import av
import av.subtitles.stream  # PyAV imports it on demand, when no file can be opened any more
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation

HEADER = struct.Struct("=IIId")
DAMAGED, UNKNOWN_CODEC, NO_VIDEO, TOO_LARGE, EXTREME_RATIO, TOO_LONG, INCOMPLETE = range(3, 10)
"""The first is also `limited_program`'s, if memory runs out."""

_CODECS = (
    "cinepak,dnxhd,dvvideo,ffv1,flv,h263,h264,hevc,huffyuv,libdav1d,mjpeg,mpeg1video,mpeg2video,mpeg4,"
    "msmpeg4,msmpeg4v2,png,prores,qtrle,rawvideo,theora,vc1,vp8,vp9,wmv1,wmv2,wmv3"
)
_OPTIONS = {
    "codec_whitelist": _CODECS,  # also while FFmpeg probes the streams, so it decodes no sound
    "enable_drefs": "0",  # MP4: samples in other files
    "max_streams": "64",
    "protocol_whitelist": "none",
}
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
    demuxer, frame_pixels, ratio, seconds, frames, pixels = arguments
    limits = _Limits(int(frame_pixels), float(ratio), float(seconds), int(frames), int(pixels))
    try:
        with _open(file, demuxer) as opened:
            timeline = _read_timeline(opened, limits)
        with _open(file, demuxer) as opened:
            _write_frames(opened, _sample_indices(timeline, limits), timeline, limits, output)
    except _Refused as refusal:
        return refusal.status
    except Exception:  # noqa: BLE001 - decoders raise errors of many kinds, all of which mean the file
        return DAMAGED
    return 0


def _refuse(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    raise PermissionError("a file refers to another one")


@contextmanager
def _open(file: BinaryIO, demuxer: str) -> Iterator[InputContainer]:
    file.seek(0)
    with av.open(
        file, "r", format=demuxer, options=_OPTIONS, metadata_errors="replace", io_open=_refuse
    ) as opened:
        if not opened.streams.video:
            raise _Refused(NO_VIDEO)
        decoder = opened.streams.video[0].codec_context
        if decoder is None or decoder.name not in _CODECS.split(","):
            raise _Refused(UNKNOWN_CODEC)
        decoder.thread_count = _DECODER_THREADS
        decoder.thread_type = "AUTO"
        yield opened


def _decoded(opened: InputContainer) -> Iterator[VideoFrame]:
    """Yields the frames in order, without those that cannot be decoded."""
    for packet in opened.demux(video=0):
        try:
            frames = packet.decode()
        except av.InvalidDataError:
            continue
        yield from frames


def _read_timeline(opened: InputContainer, limits: _Limits) -> _Timeline:
    """Returns the declared length and rate, else counts. Refuses videos beyond the limits."""
    width, height = opened.streams.video[0].width, opened.streams.video[0].height
    if min(width, height) < 1:
        raise _Refused(DAMAGED)
    if width * height > limits.max_video_frame_pixels:
        raise _Refused(TOO_LARGE)
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise _Refused(EXTREME_RATIO)
    timeline = _declared_timeline(opened) or _count_frames(opened, limits)
    if timeline.num_frames > limits.max_video_seconds * timeline.fps:
        raise _Refused(TOO_LONG)
    return timeline


def _declared_timeline(opened: InputContainer) -> _Timeline | None:
    """An MP4 file that was trimmed without encoding it again still has all frames, and a shorter duration."""
    stream = opened.streams.video[0]
    fps = float(stream.average_rate or 0)
    if stream.duration is not None and stream.time_base is not None:
        duration_s = float(stream.duration * stream.time_base)
    else:
        duration_s = (opened.duration or 0) / av.time_base
    num_frames = round(duration_s * fps)
    if stream.frames:
        num_frames = min(num_frames, stream.frames)
    return _Timeline(num_frames, fps) if num_frames >= 1 and fps <= _MAX_FPS else None


def _count_frames(opened: InputContainer, limits: _Limits) -> _Timeline:
    """Decodes all frames to count and time them, as live browser recordings (WebM) require."""
    num_frames, last_s = 0, 0.0
    for frame in _decoded(opened):
        num_frames += 1
        last_s = frame.time if frame.time is not None else last_s
        if last_s > limits.max_video_seconds or num_frames > limits.max_video_seconds * _MAX_FPS:
            break
    if num_frames == 0:
        raise _Refused(DAMAGED)
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
    opened: InputContainer,
    indices: npt.NDArray[np.int64],
    timeline: _Timeline,
    limits: _Limits,
    output: BinaryIO,
) -> None:
    """Writes the frames `indices`, RGB, each [height, width, 3], in the first one's size or shrunk alike.

    If the last of them are missing within the tolerance, repeats the last one decoded.
    """
    taken = position = height = width = 0
    last = b""
    for frame in _decoded(opened):
        if position == indices[taken]:
            if not taken:
                height, width = _target_size(frame.height, frame.width, len(indices), limits)
            picture = _to_rgb(frame, height, width)
            if not taken:
                fps = len(indices) / timeline.num_frames * timeline.fps
                output.write(HEADER.pack(len(indices), *picture.shape[:2], fps))
            last = picture.tobytes()
            output.write(last)
            taken += 1
        position += 1
        if taken == len(indices):
            break
    if not taken or position < _MIN_DECODED * timeline.num_frames:
        raise _Refused(INCOMPLETE)
    for _ in range(taken, len(indices)):
        output.write(last)


def _target_size(height: int, width: int, num_frames: int, limits: _Limits) -> tuple[int, int]:
    """Returns the size at which `num_frames` frames stay within `limits.max_video_pixels`."""
    scale = min(1.0, math.sqrt(limits.max_video_pixels / (height * width * num_frames)))
    return max(1, int(height * scale)), max(1, int(width * scale))


def _to_rgb(frame: VideoFrame, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Returns [height, width, 3], or turned by 90 degrees as the file says.

    Shrinks with antialiased bicubic filters, as the models' processors do, and before that converts to BGR:
    FFmpeg 8.1 converts to planar RGB with wrong pixels at the right edge, and shrinks that four times as
    fast."""
    converted = frame.reformat(format="bgr24", interpolation=Interpolation.BICUBIC, threads=1)
    shrunk = converted.reformat(width, height, "gbrp", interpolation=Interpolation.BICUBIC, threads=1)
    upright: npt.NDArray[np.uint8] = np.rot90(shrunk.to_ndarray(), round(frame.rotation / 90))
    return upright
