import io
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import av
import cv2
import numpy as np
import pytest

from omni_server.errors import InvalidRequestError
from omni_server.media.limits import MediaLimits
from omni_server.media.video import decode_video, decode_video_with_audio
from tests.unit.media.containers import record

LIMITS = MediaLimits()
CODECS = {"mp4": "mp4v", "mov": "mp4v", "avi": "MJPG", "mkv": "MJPG", "webm": "VP80"}


def _grey(index: int, num_frames: int) -> int:
    """Brightness of a frame, by which tests find it again."""
    return round(255 * index / max(num_frames - 1, 1))


def _file(
    folder: Path, num_frames: int, fps: float, size: tuple[int, int] = (64, 48), suffix: str = "avi"
) -> bytes:
    """Frames of one grey each, from black to white."""
    path = folder / f"video.{suffix}"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*CODECS[suffix]), fps, size)
    assert writer.isOpened()
    for index in range(num_frames):
        writer.write(np.full((size[1], size[0], 3), _grey(index, num_frames), dtype=np.uint8))
    writer.release()
    return path.read_bytes()


def _refusal(data: bytes, limits: MediaLimits = LIMITS) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decode_video(data, limits)
    assert caught.value.code == "invalid_video"
    assert caught.value.param is None
    return caught.value.message


def test_the_fixture_video_gives_two_frames_per_second(media_folder: Path) -> None:
    part = decode_video((media_folder / "ball.mp4").read_bytes(), LIMITS)
    assert part.fps == 2.0
    assert part.frames.dtype == np.uint8
    assert part.frames.shape == (6, 84, 112, 3)


@pytest.mark.parametrize(("container", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("avi", "pcm_s16le")])
def test_a_video_may_be_decoded_with_its_audio(container: str, codec: str) -> None:
    tone = (0.5 * np.sin(2 * np.pi * 440 / 48_000 * np.arange(48_000)))[None].astype(np.float32)
    data = record(container, codec, tone, 48_000, has_video=True)
    part = decode_video_with_audio(data, LIMITS)
    assert part.audio is not None
    assert part.audio.sample_rate_hz == 48_000
    heard = np.abs(np.fft.rfft(part.audio.samples))
    assert heard.argmax() * 48_000 / len(part.audio.samples) == pytest.approx(440, abs=2)
    assert np.array_equal(part.frames, decode_video(data, LIMITS).frames)


def test_a_video_without_audio_has_none(media_folder: Path) -> None:
    assert decode_video_with_audio((media_folder / "ball.mp4").read_bytes(), LIMITS).audio is None


@pytest.mark.parametrize("container", ["webm", "matroska", "avi"])
def test_a_video_with_an_empty_audio_track_has_none(container: str) -> None:
    codec = "libopus" if container == "webm" else "pcm_s16le"
    data = record(container, codec, np.zeros((1, 0), np.float32), 48_000, has_video=True)
    with av.open(io.BytesIO(data)) as file:
        assert len(file.streams.audio) == 1
    assert decode_video_with_audio(data, LIMITS).audio is None


def test_audio_that_cannot_be_read_is_refused_and_not_left_out() -> None:
    tone = np.zeros((1, 48_000), np.float32)
    data = record("avi", "ac3", tone, 48_000, has_video=True)
    with pytest.raises(InvalidRequestError) as caught:
        decode_video_with_audio(data, LIMITS)
    assert caught.value.code == "invalid_audio"


def test_frames_are_rgb_in_order(media_folder: Path) -> None:
    frames = decode_video((media_folder / "ball.mp4").read_bytes(), LIMITS).frames.astype(int)
    yellow = (frames[..., 0] > 180) & (frames[..., 1] > 160) & (frames[..., 2] < 110)
    centres = [float(np.nonzero(frame)[1].mean()) for frame in yellow]
    assert centres == sorted(centres)
    assert centres[0] == pytest.approx(14, abs=2)
    assert centres[-1] == pytest.approx(98, abs=2)


@pytest.mark.parametrize("suffix", CODECS)
def test_containers_are_read(tmp_path: Path, suffix: str) -> None:
    part = decode_video(_file(tmp_path, 24, 8, suffix=suffix), LIMITS)
    assert part.frames.shape == (6, 48, 64, 3)
    assert part.fps == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("num_frames", "fps", "taken"),
    [
        (1, 8, 1),
        (2, 8, 2),
        (3, 8, 2),
        (4, 8, 4),
        (5, 8, 4),
        (12, 24, 4),  # half a second: more often than twice a second, for the least of four
        (40, 8, 10),
        (41, 8, 10),
        (44, 8, 10),  # 11 would be odd
        (30, 1, 30),  # fewer frames per second than wanted: all of them
    ],
)
def test_the_number_of_frames_follows_the_duration(
    tmp_path: Path, num_frames: int, fps: int, taken: int
) -> None:
    part = decode_video(_file(tmp_path, num_frames, fps), LIMITS)
    assert len(part.frames) == taken
    assert part.fps == pytest.approx(taken * fps / num_frames)


def test_frames_are_spread_from_the_first_to_the_last(tmp_path: Path) -> None:
    frames = decode_video(_file(tmp_path, 41, 8), LIMITS).frames
    expected = [_grey(int(index), 41) for index in np.linspace(0, 40, 10).round()]
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), expected, atol=3)


def test_long_videos_are_sampled_further_apart(tmp_path: Path) -> None:
    part = decode_video(_file(tmp_path, 80, 8), MediaLimits(max_video_frames=6))
    assert len(part.frames) == 6
    assert part.fps == pytest.approx(0.6)


def test_frames_shrink_alike_to_stay_within_the_pixels(tmp_path: Path) -> None:
    limits = MediaLimits(max_video_pixels=6 * 32 * 24)
    frames = decode_video(_file(tmp_path, 24, 8), limits).frames
    assert frames.shape == (6, 24, 32, 3)
    np.testing.assert_allclose(frames[-1].mean(), 255, atol=3)


def test_too_large_frames_are_refused(tmp_path: Path) -> None:
    data = _file(tmp_path, 8, 8)
    decode_video(data, MediaLimits(max_video_frame_pixels=64 * 48))
    assert "more than the 3071 pixels" in _refusal(data, MediaLimits(max_video_frame_pixels=64 * 48 - 1))


def test_too_long_videos_are_refused(tmp_path: Path) -> None:
    data = _file(tmp_path, 24, 8)
    decode_video(data, MediaLimits(max_video_seconds=3.0))
    assert "longer than 2.5 s" in _refusal(data, MediaLimits(max_video_seconds=2.5))


def test_extreme_aspect_ratios_are_refused(tmp_path: Path) -> None:
    assert "aspect ratio" in _refusal(_file(tmp_path, 4, 8, size=(64, 16)), MediaLimits(max_aspect_ratio=3.0))


def test_more_bytes_than_allowed_are_refused(tmp_path: Path) -> None:
    data = _file(tmp_path, 8, 8)
    decode_video(data, MediaLimits(max_bytes=len(data)))
    assert "bytes allowed" in _refusal(data, MediaLimits(max_bytes=len(data) - 1))


def _without_duration(webm: bytes) -> bytes:
    """The same with the Matroska element Duration (ID 0x4489) made Void (0xEC), as live recordings lack
    it."""
    start = webm.index(b"\x44\x89\x88")
    return webm[:start] + b"\xec\x89" + bytes(9) + webm[start + 11 :]


def test_a_recording_that_does_not_declare_its_length_is_counted(tmp_path: Path) -> None:
    part = decode_video(_without_duration(_file(tmp_path, 24, 8, suffix="webm")), LIMITS)
    assert len(part.frames) == 6
    assert part.fps == pytest.approx(2.0, rel=0.01)


def test_a_recording_that_does_not_declare_its_length_may_be_too_long(tmp_path: Path) -> None:
    data = _without_duration(_file(tmp_path, 24, 8, suffix="webm"))
    assert "longer than 2 s" in _refusal(data, MediaLimits(max_video_seconds=2.0))


@pytest.mark.parametrize("share", [0.0, 0.002, 0.1, 0.5, 0.9])
def test_a_truncated_mp4_is_refused(media_folder: Path, share: float) -> None:
    data = (media_folder / "ball.mp4").read_bytes()
    _refusal(data[: int(share * len(data))])


@pytest.mark.parametrize("suffix", ["avi", "mkv", "webm"])
def test_half_a_video_is_refused_as_incomplete(tmp_path: Path, suffix: str) -> None:
    data = _file(tmp_path, 24, 8, suffix=suffix)
    assert "incomplete" in _refusal(data[: len(data) // 2])


def _declaring(avi: bytes, num_frames: int) -> bytes:
    """The same with another length in its stream header: `dwLength`, 32 bytes into `strh`."""
    start = avi.index(b"strh") + 8 + 32
    return avi[:start] + num_frames.to_bytes(4, "little") + avi[start + 4 :]


def test_missing_last_frames_are_replaced_by_the_last_one_taken(tmp_path: Path) -> None:
    frames = decode_video(_declaring(_file(tmp_path, 38, 8), 40), LIMITS).frames
    assert frames.shape == (10, 48, 64, 3)
    # Frame 39 was wanted and is missing; the one before it in the sample is frame 35.
    np.testing.assert_allclose(frames[-2].mean(), _grey(35, 38), atol=3)
    np.testing.assert_array_equal(frames[-1], frames[-2])


def test_more_than_a_tenth_missing_is_refused(tmp_path: Path) -> None:
    data = _file(tmp_path, 35, 8)
    assert "incomplete" in _refusal(_declaring(data, 40))


@pytest.mark.parametrize("start", [b"", b"\0\0\0\x1cftypisom", b"\x1a\x45\xdf\xa3", b"RIFF\0\0\0\0AVI LIST"])
@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_are_refused_in_plain_words(start: bytes, seed: int) -> None:
    message = _refusal(start + random.Random(seed).randbytes(3_000))
    assert message.startswith("The video ")
    assert not any(word in message.lower() for word in ("opencv", "ffmpeg", "0x", "/"))


@pytest.mark.parametrize(
    "playlist",
    [
        b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/hostname\n",
    ],
)
def test_playlists_are_not_opened(playlist: bytes) -> None:
    assert "known format" in _refusal(playlist)


def test_a_picture_is_no_video(media_folder: Path) -> None:
    _refusal((media_folder / "shapes.png").read_bytes())


def _decode_damaged(data: bytes) -> bool:
    try:
        frames = decode_video(data, LIMITS).frames
    except InvalidRequestError:
        return False
    return frames.ndim == 4 and (len(frames) % 2 == 0 or len(frames) == 1)


def test_damaged_videos_are_decoded_or_refused_but_nothing_else_in_many_threads(media_folder: Path) -> None:
    rng = random.Random(0)
    original = (media_folder / "ball.mp4").read_bytes()
    damaged = []
    for _ in range(100):
        data = bytearray(original)
        for _ in range(rng.choice([1, 5, 50, 300])):
            data[rng.randrange(12, len(data))] = rng.randrange(256)
        damaged.append(bytes(data))
    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(_decode_damaged, damaged))
    assert set(outcomes) == {True, False}
