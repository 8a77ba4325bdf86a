import io
import random
import struct

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import soxr

from omni_server.errors import InvalidRequestError
from omni_server.media.audio import count_samples, decode_audio
from omni_server.media.limits import MediaLimits
from tests.unit.media.containers import record

LIMITS = MediaLimits()
RATE_HZ = 16_000

Samples = npt.NDArray[np.float32]

CONTAINERS = [
    ("WAV", "PCM_16"),
    ("WAV", "FLOAT"),
    ("FLAC", "PCM_16"),
    ("MP3", "MPEG_LAYER_III"),
    ("OGG", "VORBIS"),
]


def _tone(seconds: float = 0.5, rate: int = RATE_HZ) -> Samples:
    return (0.5 * np.sin(2 * np.pi * 440 / rate * np.arange(int(seconds * rate)))).astype(np.float32)


def _file(samples: Samples, container: str = "WAV", subtype: str = "PCM_16", rate: int = RATE_HZ) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=container, subtype=subtype)
    return file.getvalue()


def _refusal(data: bytes, limits: MediaLimits = LIMITS, declared_format: str | None = None) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decode_audio(data, limits, declared_format)
    assert caught.value.code == "invalid_audio"
    assert caught.value.param is None
    return caught.value.message


@pytest.mark.parametrize(("container", "subtype"), [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", "PCM_16")])
def test_lossless_files_keep_their_samples(container: str, subtype: str) -> None:
    part = decode_audio(_file(_tone(), container, subtype), LIMITS)
    np.testing.assert_allclose(part.samples, _tone(), atol=1 / 32768)


def test_channels_are_averaged() -> None:
    stereo = np.stack([_tone(), np.zeros_like(_tone())], axis=1)
    part = decode_audio(_file(stereo, subtype="FLOAT"), LIMITS)
    np.testing.assert_allclose(part.samples, _tone() / 2, atol=1e-7)


def test_samples_beyond_one_are_clipped() -> None:
    part = decode_audio(_file(4 * _tone(), subtype="FLOAT"), LIMITS)
    assert (part.samples.max(), part.samples.min()) == (1.0, -1.0)


@pytest.mark.parametrize("declared", ["mp3", "wav", "nonsense", None])
def test_the_bytes_decide_not_the_declared_format(declared: str | None) -> None:
    assert decode_audio(_file(_tone(), "FLAC"), LIMITS, declared).samples.shape == (8_000,)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 24_000, 44_100, 48_000, 96_000])
@pytest.mark.parametrize(("container", "subtype"), [("WAV", "PCM_24"), ("FLAC", "PCM_24")])
def test_recordings_are_resampled_as_librosa_does(rate: int, container: str, subtype: str) -> None:
    """By soxr's HQ filter, to 16 kHz; and so that a tone below the limit of both rates stays what it is."""
    tone = _tone(2.0, rate)
    part = decode_audio(_file(tone, container, subtype, rate), LIMITS)
    assert part.sample_rate_hz == RATE_HZ
    np.testing.assert_allclose(part.samples, soxr.resample(tone, rate, RATE_HZ, quality="HQ"), atol=1e-4)
    np.testing.assert_allclose(part.samples[2_000:-2_000], _tone(2.0)[2_000:-2_000], atol=1e-4)


@pytest.mark.parametrize("declared", ["pcm16", "pcm"])
def test_headerless_pcm16_is_24_khz(declared: str) -> None:
    values = (32767 * _tone(rate=24_000)).astype("<i2")
    part = decode_audio(values.tobytes(), LIMITS, declared)
    assert (part.samples.size, part.sample_rate_hz) == (8_000, RATE_HZ)
    np.testing.assert_allclose(part.samples[500:-500], _tone()[500:-500], atol=1e-4)


def test_pcm16_that_begins_like_mpeg_audio_is_pcm16() -> None:
    values = np.full(4_800, -1, dtype="<i2")
    assert decode_audio(values.tobytes(), LIMITS, "pcm16").samples.size == 3_200


def test_a_wav_declared_as_pcm16_is_read_as_wav() -> None:
    assert decode_audio(_file(_tone()), LIMITS, "pcm16").samples.size == 8_000


def test_pcm16_that_is_not_declared_is_refused() -> None:
    assert "pcm16 must be declared" in _refusal(np.zeros(4_800, dtype="<i2").tobytes())


def test_pcm16_of_odd_length_is_refused() -> None:
    assert "odd number of bytes" in _refusal(b"\0" * 9_601, declared_format="pcm16")


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT", "IMA_ADPCM"])
def test_a_wav_whose_header_was_never_completed_is_read_to_its_end(subtype: str) -> None:
    """As recorders leave it that lose their power."""
    data = bytearray(_file(_tone(), subtype=subtype))
    start = data.index(b"data")
    data[4:8] = data[start + 4 : start + 8] = bytes(4)
    expected = decode_audio(_file(_tone(), subtype=subtype), LIMITS).samples
    np.testing.assert_allclose(decode_audio(bytes(data), LIMITS).samples, expected, atol=1e-6)


@pytest.mark.parametrize("subtype", ["GSM610", "MS_ADPCM", "ULAW", "ALAW", "G721_32"])
def test_recordings_of_telephone_systems_are_read(subtype: str) -> None:
    part = decode_audio(_file(_tone(rate=8_000), subtype=subtype, rate=8_000), LIMITS)
    assert 8_000 <= part.samples.size < 8_800  # whole blocks
    heard = np.abs(np.fft.rfft(part.samples[:8_000]))
    assert heard.argmax() * RATE_HZ / 8_000 == 440


@pytest.mark.parametrize("declared_bytes", [0x7FFF_FFDB, 0xFFFF_FF00, 0x1000_0000])
def test_a_wav_claiming_to_be_huge_gives_what_is_there(declared_bytes: int) -> None:
    data = bytearray(_file(_tone()))
    data[40:44] = struct.pack("<I", declared_bytes)
    assert decode_audio(bytes(data), LIMITS).samples.size == 8_000


def _flac_declaring(num_samples: int) -> bytes:
    """A FLAC file of 0.5 s whose STREAMINFO declares another number of samples (36 bits from bit 4 of byte
    21)."""
    data = bytearray(_file(_tone(), "FLAC"))
    data[21] = (data[21] & 0xF0) | (num_samples >> 32)
    data[22:26] = struct.pack(">I", num_samples & 0xFFFF_FFFF)
    return bytes(data)


def test_a_flac_declaring_hours_is_refused_by_its_header() -> None:
    assert "longer than 300 s" in _refusal(_flac_declaring(16_000 * 36_000))


def test_a_flac_declaring_more_than_it_has_is_refused() -> None:
    assert "damaged" in _refusal(_flac_declaring(16_000 * 10))


def test_a_flac_of_unknown_length_is_read_to_its_end() -> None:
    """As programs write it to a pipe."""
    np.testing.assert_allclose(decode_audio(_flac_declaring(0), LIMITS).samples, _tone(), atol=1 / 32768)


@pytest.mark.parametrize(
    ("container", "subtype"), [("MP3", "MPEG_LAYER_III"), ("OGG", "VORBIS"), ("OGG", "OPUS")]
)
def test_of_a_file_that_was_cut_what_is_there_is_read(container: str, subtype: str) -> None:
    """An MP3 file declares its length in its first frame."""
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 10 * RATE_HZ).astype(np.float32)
    data = _file(noise, container, subtype)
    assert 3.5 * RATE_HZ < decode_audio(data[: len(data) // 2], LIMITS).samples.size < 6 * RATE_HZ


@pytest.mark.parametrize(
    ("container", "subtype", "silence_s"),
    [
        ("FLAC", "PCM_16", 0),
        ("OGG", "VORBIS", 0),
        ("OGG", "OPUS", 0),
        ("MP3", "MPEG_LAYER_III", 0.15),  # what encoders put around a file, which only its header tells
    ],
)
def test_of_files_joined_to_one_all_are_read(container: str, subtype: str, silence_s: float) -> None:
    """As people do with the pieces of a long text that was spoken."""
    data = b"".join(_file(loudness * _tone(1), container, subtype) for loudness in (0.2, 0.4, 0.6))
    samples = decode_audio(data, LIMITS).samples
    assert 0 <= samples.size - 3 * RATE_HZ <= 2 * silence_s * RATE_HZ
    assert count_samples(data, LIMITS) == samples.size
    for at, peak in ((0.5, 0.1), (-0.5, 0.3)):
        start = int(at * RATE_HZ)
        assert np.abs(samples[start : start + 4_000]).max() == pytest.approx(peak, abs=0.02)


@pytest.mark.parametrize("name", ["adts", "mp3", "flac"])
def test_a_tag_may_precede_a_file_of_any_format(name: str) -> None:
    """ID3, which FFmpeg and streaming services write before AAC, too."""
    data = record(name, {"adts": "aac", "mp3": "libmp3lame", "flac": "flac"}[name], _tone(2)[None], RATE_HZ)
    tag = b"ID3\x04\0\0\0\0\x02\x00" + bytes(256)
    assert 2 * RATE_HZ <= decode_audio(tag + data, LIMITS).samples.size <= 2.2 * RATE_HZ


def test_the_shortest_and_longest_audio_allowed_are_taken() -> None:
    limits = MediaLimits(min_audio_seconds=0.25, max_audio_seconds=0.5)
    assert decode_audio(_file(_tone(0.25)), limits).samples.size == 4_000
    assert decode_audio(_file(_tone(0.5)), limits).samples.size == 8_000
    assert "shorter than 0.25 s" in _refusal(_file(_tone(0.25)[:-1]), limits)
    assert "longer than 0.5 s" in _refusal(_file(np.append(_tone(0.5), np.float32(0))), limits)


@pytest.mark.parametrize("container", ["WAV", "FLAC", "MP3"])
def test_too_long_audio_is_refused(container: str) -> None:
    subtype = "MPEG_LAYER_III" if container == "MP3" else "PCM_16"
    data = _file(np.zeros(2 * RATE_HZ, dtype=np.float32), container, subtype)
    assert "longer than 1.5 s" in _refusal(data, MediaLimits(max_audio_seconds=1.5))


@pytest.mark.parametrize(("container", "subtype"), CONTAINERS)
def test_samples_are_counted_without_being_decoded(container: str, subtype: str) -> None:
    data = _file(_tone(), container, subtype)
    assert count_samples(data, LIMITS) == 8_000
    with pytest.raises(InvalidRequestError, match="is longer than"):
        count_samples(data, MediaLimits(max_audio_seconds=0.25))


@pytest.mark.parametrize("data", [b"", b"nothing", b"RIFF\0\0\0\0WAVE", bytes(101)])
def test_samples_of_what_is_no_sound_cannot_be_counted(data: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        count_samples(data, MediaLimits(max_bytes=100))
    assert caught.value.code == "invalid_audio"


def test_too_long_pcm16_is_refused() -> None:
    assert "longer than 1.5 s" in _refusal(b"\0" * 96_000, MediaLimits(max_audio_seconds=1.5), "pcm16")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_finite_are_refused(bad: float) -> None:
    samples = _tone()
    samples[100] = bad
    assert "not finite" in _refusal(_file(samples, subtype="FLOAT"))


def test_more_bytes_than_allowed_are_refused() -> None:
    data = _file(_tone())
    decode_audio(data, MediaLimits(max_bytes=len(data)))
    assert "bytes allowed" in _refusal(data, MediaLimits(max_bytes=len(data) - 1))


@pytest.mark.parametrize("rate", [1, 3_999, 192_001, 0x7FFF_FFFF])
def test_absurd_sample_rates_are_refused(rate: int) -> None:
    data = bytearray(_file(_tone()))
    data[24:28] = struct.pack("<I", rate)
    assert "sample rate" in _refusal(bytes(data))


def test_too_many_channels_are_refused() -> None:
    assert "more than 8 channels" in _refusal(_file(np.zeros((4_000, 9), dtype=np.float32)))


@pytest.mark.parametrize("kept", [4, 20, 50, 200, 0.5, 0.9])
def test_a_truncated_flac_is_refused(kept: float) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 4 * RATE_HZ).astype(np.float32)
    data = _file(noise, "FLAC")
    _refusal(data[: int(kept * len(data)) if kept < 1 else int(kept)])


@pytest.mark.parametrize(
    "start", [b"", b"RIFF\0\0\0\0WAVE", b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"\xff\xf3"]
)
@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_are_refused_in_plain_words(start: bytes, seed: int) -> None:
    message = _refusal(start + random.Random(seed).randbytes(3_000))
    assert message.startswith("The audio ")
    assert not any(word in message.lower() for word in ("libsndfile", "bytesio", "0x", "/"))
