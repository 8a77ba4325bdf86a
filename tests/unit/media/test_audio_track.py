"""Sound in WebM, Matroska, MP4 and QuickTime files, and the process that reads it."""

import io
import random
import struct
import zlib
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile

from omni_server.errors import InvalidRequestError
from omni_server.media import audio, read_audio_track
from omni_server.media.audio import count_samples, decode_audio
from omni_server.media.limits import MediaLimits
from tests.unit.media.containers import (
    FRAGMENTED_MP4,
    LIVE_WEBM,
    Samples,
    matroska,
    packets,
    record,
    with_field,
    with_index_first,
    with_sound_elsewhere,
    zlib_compressed,
)

LIMITS = MediaLimits()
RATE_HZ = 16_000
DAMAGED = "The audio is damaged or in a format that this server cannot read."


def _tone(seconds: float = 0.5, rate: int = RATE_HZ) -> Samples:
    """[1, num_samples]"""
    return (0.5 * np.sin(2 * np.pi * 440 / rate * np.arange(int(seconds * rate))))[None].astype(np.float32)


def _pcm(samples: Samples) -> bytes:
    return (samples * 32767).astype("<i2").tobytes()


def _refusal(data: bytes, limits: MediaLimits = LIMITS) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decode_audio(data, limits)
    assert (caught.value.code, caught.value.param) == ("invalid_audio", None)
    return caught.value.message


def _speech(media_folder: Path) -> tuple[Samples, int]:
    samples, rate = soundfile.read(media_folder / "speech_hello.wav", dtype="float32")
    return samples[None], rate


RECORDINGS = {
    "webm": lambda: record("webm", "libopus", _tone(2, 48_000), 48_000),
    "live webm": lambda: record("webm", "libopus", _tone(2, 48_000), 48_000, options=LIVE_WEBM),
    "mkv": lambda: record("matroska", "aac", _tone(2), RATE_HZ),
    "m4a": lambda: record("ipod", "aac", _tone(2), RATE_HZ),
    "mp4": lambda: record("mp4", "aac", _tone(2, 44_100), 44_100),
    "fragmented mp4": lambda: record("mp4", "aac", _tone(2), RATE_HZ, options=FRAGMENTED_MP4),
    "lossless m4a": lambda: record("ipod", "alac", _tone(2), RATE_HZ),
    "mov": lambda: record("mov", "pcm_s16le", _tone(2), RATE_HZ),
    "webm with video": lambda: record("webm", "libopus", _tone(2, 48_000), 48_000, has_video=True),
    "mp4 with video": lambda: record("mp4", "aac", _tone(2), RATE_HZ, has_video=True),
}


@pytest.fixture(scope="module", params=RECORDINGS)
def recording(request: pytest.FixtureRequest) -> bytes:
    data: bytes = RECORDINGS[request.param]()
    return data


def test_recordings_are_read(recording: bytes) -> None:
    part = decode_audio(recording, LIMITS)
    assert part.samples.dtype == np.float32
    assert part.sample_rate_hz == RATE_HZ
    # AAC gives up to two frames more where the file does not say what of them is sound.
    assert 0 <= part.samples.size - 2 * part.sample_rate_hz <= 2048
    spectrum = np.abs(np.fft.rfft(part.samples[: part.sample_rate_hz]))
    assert spectrum.argmax() == 440
    assert np.abs(part.samples[: part.sample_rate_hz]).max() == pytest.approx(0.5, abs=0.05)


def test_samples_are_counted(recording: bytes) -> None:
    assert count_samples(recording, LIMITS) == decode_audio(recording, LIMITS).samples.size


def test_opus_is_the_same_in_webm_and_in_ogg(media_folder: Path) -> None:
    samples, _ = _speech(media_folder)
    sound = np.repeat(samples, 3, axis=1)
    webm, ogg = (record(name, "libopus", sound, 48_000, options=LIVE_WEBM) for name in ("webm", "ogg"))
    assert packets(webm) == packets(ogg)
    part, expected = decode_audio(webm, LIMITS), decode_audio(ogg, LIMITS)
    assert part.samples.size == expected.samples.size == samples.size
    np.testing.assert_allclose(part.samples, expected.samples, atol=1e-6)


@pytest.mark.parametrize("container", ["mp4", "ipod"])
def test_speech_keeps_its_place_and_length_in_aac(media_folder: Path, container: str) -> None:
    samples, rate = _speech(media_folder)
    part = decode_audio(record(container, "aac", samples, rate), LIMITS)
    assert (part.samples.size, part.sample_rate_hz) == (samples.size, rate)
    assert np.corrcoef(part.samples, samples[0])[0, 1] > 0.999


@pytest.mark.parametrize(
    ("container", "codec", "rate"), [("ipod", "alac", RATE_HZ), ("webm", "libopus", 48_000)]
)
def test_channels_are_averaged(container: str, codec: str, rate: int) -> None:
    tone = _tone(rate=rate)
    part = decode_audio(record(container, codec, np.concatenate([tone, 0 * tone]), rate), LIMITS)
    np.testing.assert_allclose(part.samples, _tone()[0] / 2, atol=1e-3 if codec == "alac" else 0.05)


def test_the_first_audio_track_is_taken() -> None:
    part = decode_audio(record("mp4", "alac", _tone(), RATE_HZ, num_tracks=3, has_video=True), LIMITS)
    np.testing.assert_allclose(part.samples, _tone()[0], atol=1 / 32768)


def test_a_title_in_no_known_encoding_does_no_harm() -> None:
    data = record("webm", "libopus", _tone(rate=48_000), 48_000, metadata={"title": "Grüße"})
    assert data.count("ü".encode()) == 1
    assert decode_audio(data.replace("ü".encode(), b"\xff\xfe"), LIMITS).samples.size == 8_000


def test_a_film_without_sound_is_refused(media_folder: Path) -> None:
    assert _refusal((media_folder / "ball.mp4").read_bytes()) == "The file has no audio track."


# -- limits


def test_too_long_audio_is_refused(recording: bytes) -> None:
    limits = MediaLimits(max_audio_seconds=1.5)
    assert "longer than 1.5 s" in _refusal(recording, limits)
    with pytest.raises(InvalidRequestError, match="longer than"):
        count_samples(recording, limits)


def test_decoding_ends_at_its_deadline(recording: bytes) -> None:
    limits = MediaLimits(decode_timeout_s=0.001)
    assert _refusal(recording, limits) == "The audio could not be decoded within 0.001 s."


@pytest.mark.parametrize("rate", [1.0, 3_999.0, 192_001.0, 1e9])
def test_absurd_sample_rates_are_refused(rate: float) -> None:
    assert "sample rate" in _refusal(matroska(_pcm(_tone()), rate=rate))


@pytest.mark.parametrize("num_channels", [9, 255])
def test_too_many_channels_are_refused(num_channels: int) -> None:
    assert _refusal(matroska(_pcm(_tone()) * num_channels, num_channels=num_channels)) in (
        "The audio has more than 8 channels.",
        DAMAGED,
    )


# -- files that nobody honest writes


def test_a_block_that_unpacks_to_gigabytes_is_refused() -> None:
    """FFmpeg unpacks the 256 frames of a block, each of 10 MB, before it gives the first one out: 2.5 GB."""
    small = matroska(zlib.compress(_pcm(_tone())), track_extra=zlib_compressed())
    assert decode_audio(small, LIMITS).samples.size == 8_000
    frames = b"\xff" + 256 * zlib.compress(bytes(9_900_000))  # 0x84: laced, all of one size
    bomb = matroska(frames, track_extra=zlib_compressed(), flags=0x84)
    assert len(bomb) < 3_000_000
    assert _refusal(bomb) == DAMAGED


def test_a_file_cannot_refer_to_another_one() -> None:
    path = "/srv/recordings/lure.raw"
    data = with_sound_elsewhere(record("mov", "pcm_s16le", _tone(), RATE_HZ), path)
    asked: list[str] = []

    def open_it(url: str, flags: int, options: dict[str, str]) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(bytes(100_000))

    # FFmpeg would follow it if it were allowed to.
    options = {"enable_drefs": "1", "use_absolute_path": "1"}
    with av.open(io.BytesIO(data), "r", format="mov", options=options, io_open=open_it) as opened:
        assert sum(frame.samples for frame in opened.decode(audio=0)) == 8_000
    assert any(url.endswith("lure.raw") for url in asked)
    assert _refusal(data) == DAMAGED


@pytest.mark.parametrize(
    "playlist",
    [
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"v=0\nc=IN IP4 127.0.0.1\nm=audio 5004 RTP/AVP 0\n",
        b'<?xml version="1.0"?><MPD><BaseURL>http://127.0.0.1/</BaseURL></MPD>',
    ],
)
def test_playlists_are_no_audio(playlist: bytes) -> None:
    assert "not in a known format" in _refusal(playlist)
    # Nor behind the mark of another format: FFmpeg is told which one to read.
    _refusal(b"\0\0\0\x18ftyp" + playlist)
    _refusal(b"\x1a\x45\xdf\xa3" + playlist)


def test_a_hundred_tracks_are_refused() -> None:
    assert _refusal(record("mp4", "aac", _tone(0.1), RATE_HZ, num_tracks=100)) == DAMAGED


@pytest.mark.parametrize("kind", [b"stsz", b"stts"])
def test_a_table_that_claims_to_be_huge_takes_no_memory(kind: bytes) -> None:
    data = record("mp4", "aac", _tone(), RATE_HZ)
    if kind == b"stsz":  # samples of one byte, 268 million of them
        data = with_field(data, kind, 12, struct.pack(">II", 1, 0x0FFF_FFFF))
    else:
        data = with_field(data, kind, 12, struct.pack(">III", 0x0FFF_FFFF, 0x0FFF_FFFF, 0x7FFF_FFFF))
    assert _refusal(data) == DAMAGED


def test_a_recording_claiming_to_last_for_hours_gives_what_is_there() -> None:
    data = record("mp4", "alac", _tone(), RATE_HZ)
    data = with_field(data, b"mdhd", 24, struct.pack(">I", 0x7FFF_FFFF))
    assert decode_audio(data, LIMITS).samples.size == 8_000


# -- damaged files


@pytest.mark.parametrize("name", ["webm", "mkv", "m4a", "mp4", "fragmented mp4", "lossless m4a", "mov"])
@pytest.mark.parametrize("kept", [100, 0.5, 0.99])
def test_truncated_files_are_refused(name: str, kept: float) -> None:
    data = RECORDINGS[name]()
    assert _refusal(data[: int(kept * len(data)) if kept < 1 else int(kept)]) == DAMAGED


@pytest.mark.parametrize("kept", [0.1, 0.99])
def test_a_file_cut_behind_its_index_is_refused(tmp_path: Path, kept: float) -> None:
    data = with_index_first(record("mp4", "aac", _tone(2), RATE_HZ), tmp_path)
    start = data.index(b"mdat")
    assert decode_audio(data, LIMITS).samples.size == 2 * RATE_HZ
    assert _refusal(data[: start + int(kept * (len(data) - start))]) == DAMAGED


@pytest.mark.parametrize("name", ["webm", "m4a"])
def test_what_follows_a_whole_file_does_no_harm(name: str) -> None:
    data = RECORDINGS[name]()
    for more in (bytes(64), b"a remark of whoever made it"):
        assert decode_audio(data + more, LIMITS).samples.size == decode_audio(data, LIMITS).samples.size


def test_a_live_recording_without_its_end_gives_what_is_there() -> None:
    data = record("webm", "libopus", _tone(2, 48_000), 48_000, options=LIVE_WEBM)
    assert 13_000 < decode_audio(data[: len(data) // 2], LIMITS).samples.size < 19_000


@pytest.mark.parametrize("start", [b"\x1a\x45\xdf\xa3", b"\0\0\0\x18ftypM4A \0\0\0\0isom"])
@pytest.mark.parametrize("seed", range(2))
def test_random_bytes_are_refused_in_plain_words(start: bytes, seed: int) -> None:
    assert _refusal(start + random.Random(seed).randbytes(3_000)) == DAMAGED


# -- the process


@pytest.mark.parametrize(
    ("rate", "num_channels", "message"),
    [(16_000, 0, "no channel"), (16_000, 2**32 - 1, "channels"), (0, 1, "sample rate")],
)
def test_sound_of_no_possible_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: int, num_channels: int, message: str
) -> None:
    """From a decoder that a file has taken over. No channel was a division by zero; found by letting a
    process write at random."""
    program = tmp_path / "reader.py"
    program.write_text(
        "def read(file, output, arguments):\n"
        f"    output.write({read_audio_track.HEADER.pack(rate, num_channels, 0)!r} + bytes(64))\n"
        "    return 0\n"
    )
    monkeypatch.setattr(audio, "_MODULE", program)
    with pytest.raises(InvalidRequestError, match=message):
        decode_audio(b"\0\0\0\x18ftypmp42", LIMITS)
