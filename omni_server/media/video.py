"""Decodes videos to sampled RGB frames with FFmpeg in a separate process, and their audio tracks in another
one, which only reads audio."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

from omni_server.errors import InvalidRequestError
from omni_server.media.audio import decode_audio_track
from omni_server.media.demuxer import VIDEO_DEMUXERS, demuxer_of
from omni_server.media.limited_process import Cancellation, Output, Reader, read_in_process
from omni_server.media.limits import MediaLimits
from omni_server.types import VideoPart

_MODULE = Path(__file__).with_name("read_video.py")
_HEADER = struct.Struct("=IIId")
_DAMAGED, _UNKNOWN_CODEC, _NO_VIDEO, _TOO_LARGE, _EXTREME_RATIO, _TOO_LONG, _INCOMPLETE = range(3, 10)
"""As in the module: importing it would load FFmpeg."""
_DECODER_THREADS = 2
"""As in the module: up to this many CPU seconds per second."""
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",  # one arena per thread would take 64 MiB of address space each
    "OPENBLAS_NUM_THREADS": "1",  # numpy's: on many cores, more would use up the address space
}

_BASE_MEMORY_BYTES = 512 * 1024 * 1024
"""Address space of the process. Python, numpy, FFmpeg and a small video use 246 MiB of it."""
_MEMORY_BYTES_PER_PIXEL = 96
"""Per pixel of `max_video_frame_pixels`, for the decoder's reference frames. Measured at 4096 x 2304, beyond
what a small video takes: 10-bit AV1, 65 bytes; H.264 with 16 of them in 4:2:0 and 10-bit HEVC, 50; ProRes 30;
VP9, MPEG-4, FFV1 and MJPEG, 16 to 26."""


def decode_video(data: bytes, limits: MediaLimits, cancellation: Cancellation | None = None) -> VideoPart:
    """Returns evenly spaced frames, about two per second, as `smart_nframes` of qwen-vl-utils chooses them.

    The number of frames is even and at least four if the video has that many, and at most
    `limits.max_video_frames`. `fps` of the result is the rate at which the frames were sampled. Accepts MP4,
    QuickTime, WebM, Matroska and AVI. Raises `InvalidRequestError` with code
    `invalid_video`, or `media_too_large` if decoding takes too long, and `OmniError` if the decoder cannot be
    run.
    """
    if len(data) > limits.max_bytes:
        raise _invalid(f"is larger than the {limits.max_bytes} bytes allowed")
    demuxer = demuxer_of(data)
    if demuxer is None or demuxer not in VIDEO_DEMUXERS:
        raise _invalid("is not in a known format (mp4, mov, webm, mkv, avi)")
    with read_in_process(_reader(demuxer, limits), data, cancellation or Cancellation()) as output:
        return _read_frames(output, limits)


def decode_video_with_audio(
    data: bytes, limits: MediaLimits, cancellation: Cancellation | None = None
) -> VideoPart:
    """As `decode_video`, with the first audio track of the file if it has one, from beginning to end. Raises
    `InvalidRequestError` with code `invalid_audio`, too."""
    video = decode_video(data, limits, cancellation)
    return replace(video, audio=decode_audio_track(data, limits, cancellation))


def _reader(demuxer: str, limits: MediaLimits) -> Reader:
    numbers = (
        limits.max_video_frame_pixels,
        limits.max_aspect_ratio,
        limits.max_video_seconds,
        limits.max_video_frames,
        limits.max_video_pixels,
    )
    return Reader(
        module=_MODULE,
        arguments=[demuxer, *map(repr, numbers)],
        reads="the video",
        environment=_ENVIRONMENT,
        max_memory_bytes=_BASE_MEMORY_BYTES + _MEMORY_BYTES_PER_PIXEL * limits.max_video_frame_pixels,
        max_cpu_s=int(_DECODER_THREADS * limits.decode_timeout_s) + 1,
        timeout_s=limits.decode_timeout_s,
        refusals={
            _DAMAGED: _invalid("is damaged or incomplete"),
            _UNKNOWN_CODEC: _invalid("is in a codec that this server cannot read"),
            _NO_VIDEO: _invalid("has no video track"),
            _TOO_LARGE: _invalid(f"has more than the {limits.max_video_frame_pixels} pixels allowed"),
            _EXTREME_RATIO: _invalid(f"has an aspect ratio above {limits.max_aspect_ratio:g}"),
            _TOO_LONG: _invalid(f"is longer than {limits.max_video_seconds:g} s"),
            _INCOMPLETE: _invalid("is incomplete: it has fewer frames than it declares"),
        },
        # As for media decoded in the server itself.
        too_slow=InvalidRequestError(
            f"The media item could not be decoded within {limits.decode_timeout_s:g} s.",
            code="media_too_large",
        ),
    )


def _read_frames(output: Output, limits: MediaLimits) -> VideoPart:
    num_frames, height, width, fps = _HEADER.unpack(output.read(_HEADER.size))
    # Trusted only within the limits. A side of a single pixel cannot shrink any further.
    max_pixels = max(limits.max_video_pixels, num_frames * limits.max_aspect_ratio)
    if (
        not 1 <= num_frames <= max(limits.max_video_frames, 1)
        or not 1 <= height * width * num_frames <= max_pixels
    ):
        raise output.damaged(f"{num_frames} frames of {width} x {height} pixels")
    # Memory is only committed as it is written to.
    frames = np.empty((num_frames, height, width, 3), dtype=np.uint8)
    output.read_into(frames.data.cast("B"))
    output.check_nothing_left()
    return VideoPart(frames, fps)


def _invalid(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"The video {what}.", code="invalid_video")
