"""WebM and MP4 files: as recorders write them, and as nobody honest does."""

import io
import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

LIVE_WEBM = {"live": "1"}
"""As browsers record: no sizes, no duration, no index."""
FRAGMENTED_MP4 = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
"""Likewise."""


def record(
    container: str,
    codec: str,
    samples: Samples,
    rate: int,
    *,
    options: dict[str, str] | None = None,
    has_video: bool = False,
    metadata: dict[str, str] | None = None,
    num_tracks: int = 1,
) -> bytes:
    """A file with `samples` [num_channels, num_samples]; without any, the track is empty. With more than one
    track, the further ones are silent."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options or {}) as output:
        output.metadata.update(metadata or {})
        if has_video:
            video = (
                output.add_stream("libvpx", rate=10)
                if container == "webm"
                else output.add_stream("mpeg4", rate=10)
            )
            video.width = video.height = 64
            video.pix_fmt = "yuv420p"
        tracks = [output.add_stream(codec, rate=rate) for _ in range(num_tracks)]
        layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(samples)]
        for track in tracks:
            track.layout = layout
        if has_video:
            for index in range(10):
                picture = np.full((64, 64, 3), 20 * index, dtype=np.uint8)
                output.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            output.mux(video.encode())
        for index, track in enumerate(tracks if samples.size else []):
            sound = samples if index == 0 else np.zeros_like(samples)
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound), format="fltp", layout=layout)
            frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
            output.mux(track.encode(frame))
            output.mux(track.encode())
    return file.getvalue()


def packets(data: bytes) -> list[bytes]:
    """Of the first sound track, as they were encoded."""
    with av.open(io.BytesIO(data), "r") as source:
        return [bytes(packet) for packet in source.demux(audio=0) if packet.size]


def with_index_first(mp4: bytes, folder: Path) -> bytes:
    file = folder / "index_first.mp4"
    options = {"movflags": "faststart"}  # has it written to a file and read again
    with av.open(io.BytesIO(mp4), "r") as source, av.open(str(file), "w", options=options) as output:
        track = output.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(audio=0):
            if packet.size:
                packet.stream = track
                output.mux(packet)
    return file.read_bytes()


def boxes(data: bytes, start: int = 0, end: int | None = None) -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and end of an MP4 file's boxes, in order, with those inside of others."""
    end = len(data) if end is None else end
    while start + 8 <= end:
        size, kind = struct.unpack_from(">I4s", data, start)
        yield kind, start, start + size
        if kind in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"stbl"):
            yield from boxes(data, start + 8, start + size)
        start += size


def with_sound_elsewhere(mov: bytes, path: str) -> bytes:
    """A QuickTime file, its `moov` at the end, whose samples are said to be in the file `path`: a Macintosh
    alias."""
    name = path.rpartition("/")[2].encode()
    alias = (
        bytes(10)
        + b"\x01/".ljust(28, b"\0")
        + bytes(12)
        + bytes([len(name)])
        + name.ljust(63, b"\0")
        + bytes(16)
    )
    alias += struct.pack(">hh", 1, 1) + bytes(16)
    alias += (
        struct.pack(">hh", 2, len(path)) + path.encode() + bytes(len(path) % 2) + struct.pack(">hh", -1, 0)
    )
    entry = struct.pack(">I4sI", 12 + len(alias), b"alis", 0) + alias
    result = bytearray(mov)
    start, end = next((start, end) for kind, start, end in boxes(mov) if kind == b"dref")
    result[start:end] = struct.pack(">I4sII", 16 + len(entry), b"dref", 0, 1) + entry
    for kind, outer, outer_end in boxes(mov):
        if kind in (b"moov", b"trak", b"mdia", b"minf", b"dinf") and outer < start < outer_end:
            size = outer_end - outer + 16 + len(entry) - (end - start)
            result[outer : outer + 4] = struct.pack(">I", size)
    return bytes(result)


def with_field(mp4: bytes, kind: bytes, offset: int, value: bytes) -> bytes:
    """`value` in place of what is `offset` bytes into the first box of that kind."""
    start = next(start for found, start, _ in boxes(mp4) if found == kind) + offset
    return mp4[:start] + value + mp4[start + len(value) :]


def matroska(
    frames: bytes,
    *,
    rate: float = 16_000.0,
    num_channels: int = 1,
    track_extra: bytes = b"",
    flags: int = 0x80,
) -> bytes:
    """One block of PCM, of 16 bits or what `track_extra` makes of it."""
    sound = (
        _element(0xB5, struct.pack(">d", rate))
        + _element(0x9F, bytes([num_channels]))
        + _element(0x6264, b"\x10")
    )
    return _matroska(2, b"A_PCM/INT/LIT", _element(0xE1, sound) + track_extra, frames, flags)


def matroska_video(
    frames: bytes,
    *,
    width: int,
    height: int,
    codec: bytes = b"V_MJPEG",
    track_extra: bytes = b"",
    flags: int = 0x80,
) -> bytes:
    """One block, which does not declare how long it lasts."""
    size = _element(0xB0, width.to_bytes(4)) + _element(0xBA, height.to_bytes(4))
    return _matroska(1, codec, _element(0xE0, size) + track_extra, frames, flags)


def _matroska(kind: int, codec: bytes, track_extra: bytes, frames: bytes, flags: int) -> bytes:
    track = _element(0xD7, b"\1") + _element(0x73C5, b"\1") + _element(0x83, bytes([kind]))
    track += _element(0x86, codec) + track_extra
    block = _element(0xA3, b"\x81\0\0" + bytes([flags]) + frames)
    segment = _element(0x1654AE6B, _element(0xAE, track)) + _element(
        0x1F43B675, _element(0xE7, b"\0") + block
    )
    return _element(0x1A45DFA3, _element(0x4282, b"matroska")) + _element(0x18538067, segment)


def zlib_compressed() -> bytes:
    """What makes the blocks of a track be unpacked before they are decoded."""
    compression = _element(0x5034, _element(0x4254, b"\0"))
    return _element(0x6D80, _element(0x6240, _element(0x5032, b"\1") + _element(0x5033, b"\0") + compression))


def _element(id: int, payload: bytes) -> bytes:
    return id.to_bytes((id.bit_length() + 7) // 8) + b"\1" + len(payload).to_bytes(7) + payload
