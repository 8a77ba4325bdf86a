"""Videos that nobody honest sends, and the process that they are decoded in."""

import io
import json
import subprocess
import sys
import zlib
from pathlib import Path

import av
import numpy as np
import pytest

from omni_server.errors import InvalidRequestError
from omni_server.media import read_video, video
from omni_server.media.limits import MediaLimits
from omni_server.media.video import decode_video
from tests.unit.media.containers import matroska_video, zlib_compressed

LIMITS = MediaLimits()
DAMAGED = "The video is damaged or incomplete."

MEASURE = """
import json, resource, sys
from omni_server.errors import InvalidRequestError
from omni_server.media.video import decode_video
from omni_server.media.limits import MediaLimits
try:
    outcome = str(decode_video(sys.stdin.buffer.read(), MediaLimits()).frames.shape)
except InvalidRequestError as error:
    outcome = error.code
own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
process = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps([outcome, own, process, "av" in sys.modules]))
"""


def _measure(data: bytes) -> tuple[str, int, int, bool]:
    """What becomes of a video, the most memory in MiB that the server and its process took, whether FFmpeg is
    in it."""
    done = subprocess.run([sys.executable, "-c", MEASURE], input=data, capture_output=True, check=True)
    outcome, own, process, is_loaded = json.loads(done.stdout)
    return outcome, own // 1024, process // 1024, is_loaded


def _error(data: bytes, limits: MediaLimits = LIMITS) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        decode_video(data, limits)
    assert caught.value.param is None
    return caught.value


@pytest.fixture(scope="module")
def ball(media_folder: Path) -> bytes:
    return (media_folder / "ball.mp4").read_bytes()


@pytest.fixture
def instead_of_ffmpeg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A module with the body of a reader, to be written."""
    module = tmp_path / "reader.py"
    monkeypatch.setattr(video, "_MODULE", module)
    return module


def test_ffmpeg_is_not_loaded_into_the_server(ball: bytes) -> None:
    outcome, _, _, is_loaded = _measure(ball)
    assert (outcome, is_loaded) == ("(6, 84, 112, 3)", False)


def test_a_block_that_unpacks_to_gigabytes_is_refused() -> None:
    """FFmpeg unpacks the 256 frames of a block, each of 10 MB, before it gives the first one out: 2.5 GB."""
    frames = b"\xff" + 256 * zlib.compress(bytes(9_900_000))  # 0x84: laced, all of one size
    bomb = matroska_video(frames, width=64, height=48, track_extra=zlib_compressed(), flags=0x84)
    assert len(bomb) < 3_000_000
    outcome, own, process, _ = _measure(bomb)
    assert outcome == "invalid_video"
    assert own < 200
    assert process < 1_400


def test_a_video_that_crashes_ffmpeg_leaves_the_server_alone() -> None:
    """Found by changing files at random: OpenCV 5.0.0 ended with SIGSEGV over an AVI file whose index is
    wrong."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as output:
        video = output.add_stream("mjpeg", rate=8)
        video.width = video.height = 16
        video.pix_fmt = "yuvj420p"
        blocks = (
            np.random.default_rng(0)
            .integers(0, 256, (3, 3, 3), dtype=np.uint8)
            .repeat(8, 0)
            .repeat(8, 1)[:16, :16]
        )
        for index in range(4):
            picture = np.ascontiguousarray(np.roll(blocks, 7 * index, axis=1))
            output.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(video.encode())
    avi = file.getvalue()
    assert _measure(avi)[0] == "(4, 16, 16, 3)"
    first_frame = avi.index(b"00dc", avi.index(b"movi"))
    outcome, own, _, _ = _measure(avi[: first_frame + 30] + bytes(14) + avi[first_frame + 30 :])
    assert outcome == "invalid_video"
    assert own < 200


def test_the_process_makes_no_other_pixels(ball: bytes) -> None:
    arguments = ["mov", "9437184", "200.0", "384.0", "768", "50000"]
    expected = io.BytesIO()
    assert read_video.read(io.BytesIO(ball), expected, arguments) == 0
    part = decode_video(ball, MediaLimits(max_video_pixels=50_000))
    header = read_video.HEADER.pack(len(part.frames), *part.frames.shape[1:3], part.fps)
    assert header + part.frames.tobytes() == expected.getvalue()
    assert part.frames.size < 3 * 50_000


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (read_video.DAMAGED, DAMAGED),
        (read_video.UNKNOWN_CODEC, "The video is in a codec that this server cannot read."),
        (read_video.NO_VIDEO, "The video has no video track."),
        (read_video.TOO_LARGE, "The video has more than the 9437184 pixels allowed."),
        (read_video.EXTREME_RATIO, "The video has an aspect ratio above 200."),
        (read_video.TOO_LONG, "The video is longer than 384 s."),
        (read_video.INCOMPLETE, "The video is incomplete: it has fewer frames than it declares."),
    ],
)
def test_every_refusal_has_its_words(instead_of_ffmpeg: Path, ball: bytes, status: int, message: str) -> None:
    instead_of_ffmpeg.write_text(f"def read(*_): return {status}\n")
    error = _error(ball)
    assert (error.message, error.code) == (message, "invalid_video")


def test_a_process_that_hangs_is_ended_as_late_media_are(instead_of_ffmpeg: Path, ball: bytes) -> None:
    instead_of_ffmpeg.write_text("import time\ndef read(*_): time.sleep(600)\n")
    error = _error(ball, MediaLimits(decode_timeout_s=0.5))
    assert error.message == "The media item could not be decoded within 0.5 s."
    assert error.code == "media_too_large"


@pytest.mark.parametrize(
    ("num_frames", "height", "width"),
    [(0, 84, 112), (6, 0, 112), (769, 1, 1), (768, 9_000, 9_000), (1, 0xFFFF_FFFF, 0xFFFF_FFFF)],
)
def test_a_process_that_was_taken_over_cannot_ask_for_memory(
    instead_of_ffmpeg: Path, ball: bytes, num_frames: int, height: int, width: int
) -> None:
    header = read_video.HEADER.pack(num_frames, height, width, 2.0)
    instead_of_ffmpeg.write_text(
        "def read(file, output, arguments):\n"
        f"    output.write({header!r})\n"
        "    while True: output.write(bytes(65536))\n"
    )
    assert _error(ball).message == DAMAGED


def test_the_smallest_frames_are_taken_though_they_are_over_the_limit(ball: bytes) -> None:
    part = decode_video(ball, MediaLimits(max_video_pixels=3))
    np.testing.assert_array_equal(part.frames.shape, (6, 1, 1, 3))
