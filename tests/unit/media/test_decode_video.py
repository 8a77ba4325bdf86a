import io
import random
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from omni_server.errors import InvalidRequestError
from omni_server.media.limits import MediaLimits
from omni_server.media.video import decode_video, decode_video_with_audio
from tests.unit.media.containers import record

LIMITS = MediaLimits()
CODECS = {"mp4": "mpeg4", "mov": "mpeg4", "avi": "mjpeg", "mkv": "mjpeg", "webm": "libvpx"}


def _grey(index: int, num_frames: int) -> int:
    """Brightness of a frame, by which tests find it again."""
    return round(255 * index / max(num_frames - 1, 1))


def _file(
    num_frames: int,
    fps: int,
    size: tuple[int, int] = (64, 48),
    suffix: str = "avi",
    codec: str | None = None,
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
    degrees: int = 0,
) -> bytes:
    """Frames of one grey each, from black to white. `degrees`: how far players turn them."""
    codec = codec or CODECS[suffix]
    file = io.BytesIO()
    with av.open(file, "w", format="matroska" if suffix == "mkv" else suffix) as output:
        video = output.add_stream(codec, rate=fps, options=options)
        video.width, video.height = size
        video.pix_fmt = "yuvj420p" if codec == "mjpeg" else pixels
        if degrees:
            video.set_display_rotation(degrees)
        for index in range(num_frames):
            picture = np.full((size[1], size[0], 3), _grey(index, num_frames), dtype=np.uint8)
            output.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(video.encode())
    return file.getvalue()


def _trimmed(mp4: bytes, skipped_s: Fraction) -> bytes:
    """The same packets with an edit list that skips the first `skipped_s` seconds."""
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(mp4)) as source,
        av.open(file, "w", format="mp4", options={"avoid_negative_ts": "disabled"}) as output,
    ):
        video = output.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                skipped = int(skipped_s / packet.time_base)
                packet.pts, packet.dts = packet.pts - skipped, packet.dts - skipped
                packet.stream = video
                output.mux(packet)
    return file.getvalue()


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
    assert part.audio.sample_rate_hz == 16_000
    heard = np.abs(np.fft.rfft(part.audio.samples))
    assert heard.argmax() * 16_000 / len(part.audio.samples) == pytest.approx(440, abs=2)
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
def test_containers_are_read(suffix: str) -> None:
    part = decode_video(_file(24, 8, suffix=suffix), LIMITS)
    assert part.frames.shape == (6, 48, 64, 3)
    assert part.fps == pytest.approx(2.0)


@pytest.mark.parametrize("suffix", ["mp4", "webm"])
def test_av1_is_read(suffix: str) -> None:
    frames = decode_video(_file(24, 8, suffix=suffix, codec="libsvtav1"), LIMITS).frames
    assert frames.shape == (6, 48, 64, 3)
    expected = [_grey(int(index), 24) for index in np.linspace(0, 23, 6).round()]
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), expected, atol=4)


def test_interlaced_frames_are_read_as_they_are_stored() -> None:
    """FFmpeg cannot convert them with the options of a progressive frame: they would be black."""
    data = _file(24, 8, suffix="mp4", options={"flags": "+ildct+ilme"})
    with av.open(io.BytesIO(data)) as file:
        assert next(file.decode(video=0)).interlaced_frame
    frames = decode_video(data, LIMITS).frames
    np.testing.assert_allclose(frames[-1].mean(), 255, atol=3)


def test_10_bit_frames_are_read_with_the_same_colours() -> None:
    ten, eight = (
        decode_video(_file(24, 8, suffix="mp4", codec="libx265", pixels=pixels), LIMITS).frames
        for pixels in ("yuv420p10le", "yuv420p")
    )
    np.testing.assert_allclose(ten.astype(int), eight, atol=3)


@pytest.mark.parametrize(("degrees", "shape"), [(90, (64, 48)), (180, (48, 64)), (270, (64, 48))])
def test_frames_are_turned_as_the_file_says(degrees: int, shape: tuple[int, int]) -> None:
    frames = decode_video(_file(24, 8, suffix="mp4", degrees=degrees), LIMITS).frames
    assert frames.shape == (6, *shape, 3)


def test_a_video_that_was_trimmed_without_encoding_it_again_is_read() -> None:
    """Its file has all 24 frames, of which an edit list shows the last 15."""
    data = _trimmed(_file(24, 8, suffix="mp4"), Fraction(9, 8))
    with av.open(io.BytesIO(data)) as file:
        assert file.streams.video[0].frames == 24
        assert sum(1 for _ in file.decode(video=0)) == 15
    part = decode_video(data, LIMITS)
    assert part.frames.shape == (4, 48, 64, 3)
    assert part.fps == pytest.approx(4 / (15 / 8))


def test_a_codec_that_is_not_read_is_named_as_the_cause() -> None:
    assert _refusal(_file(24, 8, codec="snow")) == "The video is in a codec that this server cannot read."


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
def test_the_number_of_frames_follows_the_duration(num_frames: int, fps: int, taken: int) -> None:
    part = decode_video(_file(num_frames, fps), LIMITS)
    assert len(part.frames) == taken
    assert part.fps == pytest.approx(taken * fps / num_frames)


def test_frames_are_spread_from_the_first_to_the_last() -> None:
    frames = decode_video(_file(41, 8), LIMITS).frames
    expected = [_grey(int(index), 41) for index in np.linspace(0, 40, 10).round()]
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), expected, atol=3)


def test_long_videos_are_sampled_further_apart() -> None:
    part = decode_video(_file(80, 8), MediaLimits(max_video_frames=6))
    assert len(part.frames) == 6
    assert part.fps == pytest.approx(0.6)


def test_frames_shrink_alike_to_stay_within_the_pixels() -> None:
    limits = MediaLimits(max_video_pixels=6 * 32 * 24)
    frames = decode_video(_file(24, 8), limits).frames
    assert frames.shape == (6, 24, 32, 3)
    np.testing.assert_allclose(frames[-1].mean(), 255, atol=3)


def test_too_large_frames_are_refused() -> None:
    data = _file(8, 8)
    decode_video(data, MediaLimits(max_video_frame_pixels=64 * 48))
    assert "more than the 3071 pixels" in _refusal(data, MediaLimits(max_video_frame_pixels=64 * 48 - 1))


def test_too_long_videos_are_refused() -> None:
    data = _file(24, 8)
    decode_video(data, MediaLimits(max_video_seconds=3.0))
    assert "longer than 2.5 s" in _refusal(data, MediaLimits(max_video_seconds=2.5))


def test_extreme_aspect_ratios_are_refused() -> None:
    assert "aspect ratio" in _refusal(_file(4, 8, size=(64, 16)), MediaLimits(max_aspect_ratio=3.0))


def test_more_bytes_than_allowed_are_refused() -> None:
    data = _file(8, 8)
    decode_video(data, MediaLimits(max_bytes=len(data)))
    assert "bytes allowed" in _refusal(data, MediaLimits(max_bytes=len(data) - 1))


def _without_duration(webm: bytes) -> bytes:
    """The same with the Matroska element Duration (ID 0x4489) made Void (0xEC), as live recordings lack
    it."""
    start = webm.index(b"\x44\x89\x88")
    return webm[:start] + b"\xec\x89" + bytes(9) + webm[start + 11 :]


def test_a_recording_that_does_not_declare_its_length_is_counted() -> None:
    part = decode_video(_without_duration(_file(24, 8, suffix="webm")), LIMITS)
    assert len(part.frames) == 6
    assert part.fps == pytest.approx(2.0, rel=0.01)


def test_a_recording_that_does_not_declare_its_length_may_be_too_long() -> None:
    data = _without_duration(_file(24, 8, suffix="webm"))
    assert "longer than 2 s" in _refusal(data, MediaLimits(max_video_seconds=2.0))


@pytest.mark.parametrize("share", [0.0, 0.002, 0.1, 0.5, 0.9])
def test_a_truncated_mp4_is_refused(media_folder: Path, share: float) -> None:
    data = (media_folder / "ball.mp4").read_bytes()
    _refusal(data[: int(share * len(data))])


@pytest.mark.parametrize("suffix", ["avi", "mkv", "webm"])
def test_half_a_video_is_refused_as_incomplete(suffix: str) -> None:
    data = _file(24, 8, suffix=suffix)
    assert "incomplete" in _refusal(data[: len(data) // 2])


def _declaring(avi: bytes, num_frames: int) -> bytes:
    """The same with another length in its stream header: `dwLength`, 32 bytes into `strh`."""
    start = avi.index(b"strh") + 8 + 32
    return avi[:start] + num_frames.to_bytes(4, "little") + avi[start + 4 :]


def test_missing_last_frames_are_replaced_by_the_last_one_taken() -> None:
    frames = decode_video(_declaring(_file(38, 8), 40), LIMITS).frames
    assert frames.shape == (10, 48, 64, 3)
    # Frame 39 was wanted and is missing; the one before it in the sample is frame 35.
    np.testing.assert_allclose(frames[-2].mean(), _grey(35, 38), atol=3)
    np.testing.assert_array_equal(frames[-1], frames[-2])


def test_more_than_a_tenth_missing_is_refused() -> None:
    data = _file(35, 8)
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
