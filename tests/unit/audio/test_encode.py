import io
import wave
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from omni_server.audio.encode import StreamEncoder, encode
from omni_server.audio.formats import AUDIO_FORMATS, AudioFormat
from omni_server.errors import OmniError
from tests.audio_files import read_audio

FILE_FORMATS: tuple[AudioFormat, ...] = ("wav", "mp3", "flac", "opus")
"""Those that libsndfile reads, too."""
COMPRESSED: tuple[AudioFormat, ...] = ("mp3", "flac", "opus", "aac")
LOSSLESS: tuple[AudioFormat, ...] = ("wav", "flac", "pcm16")

Samples = npt.NDArray[np.float32]


def _tone(num_samples: int) -> Samples:
    return (0.5 * np.sin(2 * np.pi * 440 / 24_000 * np.arange(num_samples))).astype(np.float32)


def _read(data: bytes, format: AudioFormat) -> npt.NDArray[np.int16]:
    if format == "pcm16":
        return np.frombuffer(data, dtype="<i2")
    samples, _ = soundfile.read(io.BytesIO(data), dtype="int16")
    return np.asarray(samples)


@pytest.mark.parametrize(
    ("format", "container", "subtype"),
    [
        ("wav", "WAV", "PCM_16"),
        ("flac", "FLAC", "PCM_16"),
        ("mp3", "MP3", "MPEG_LAYER_III"),
        ("opus", "OGG", "OPUS"),
    ],
)
def test_files_have_the_container_codec_rate_and_duration_of_their_format(
    format: AudioFormat, container: str, subtype: str
) -> None:
    info = soundfile.info(io.BytesIO(encode(_tone(36_000), format)))
    assert (info.format, info.subtype) == (container, subtype)
    assert (info.samplerate, info.channels, info.frames) == (24_000, 1, 36_000)


@pytest.mark.parametrize("format", LOSSLESS)
def test_lossless_formats_return_every_int16_value(format: AudioFormat) -> None:
    values = np.arange(-32768, 32768, dtype=np.int16)
    read = _read(encode(values.astype(np.float32) / np.float32(32768), format), format)
    np.testing.assert_array_equal(read, values)


def test_aac_is_in_adts_frames_at_24_khz_and_keeps_its_duration() -> None:
    data = encode(_tone(36_000), "aac")
    assert data[0] == 0xFF
    assert data[1] & 0xF6 == 0xF0  # MPEG-4, layer 0: proper ADTS
    assert (data[2] >> 2) & 0xF == 6  # 24 kHz
    assert (
        36_000 <= len(read_audio(data)) <= 36_000 + 3 * 1024
    )  # whole frames, and one before the first sample


@pytest.mark.parametrize("format", ["mp3", "opus", "aac"])
def test_lossy_formats_return_a_tone_of_the_same_pitch_and_level(format: AudioFormat) -> None:
    read = read_audio(encode(_tone(24_000), format))[2_000:22_000].astype(np.float64) / 32768
    spectrum = np.abs(np.fft.rfft(read))
    assert int(spectrum.argmax()) * 24_000 / len(read) == pytest.approx(440, abs=1.5)
    assert np.sqrt(np.mean(read**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.1)


@pytest.mark.parametrize("format", LOSSLESS)
def test_samples_outside_the_range_saturate(format: AudioFormat) -> None:
    samples = np.array([1.0, 1.5, 100.0, -1.0, -1.5, -100.0], dtype=np.float32)
    assert _read(encode(samples, format), format).tolist() == [32767, 32767, 32767, -32768, -32768, -32768]


def test_mp3_has_a_constant_bit_rate() -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 48_000).astype(np.float32)
    tone_bytes, noise_bytes, silence_bytes = (
        len(encode(samples, "mp3")) for samples in (_tone(48_000), noise, np.zeros(48_000, dtype=np.float32))
    )
    assert tone_bytes == noise_bytes == silence_bytes
    assert 8 * tone_bytes / 2.0 == pytest.approx(80_000, rel=0.1)


@pytest.mark.parametrize("format", FILE_FORMATS)
def test_no_samples_give_a_file_that_opens(format: AudioFormat) -> None:
    read = _read(encode(np.zeros(0, dtype=np.float32), format), format)
    assert len(read) in (range(1) if format == "wav" else range(1, 100))
    assert not read.any()


@pytest.mark.parametrize("format", AUDIO_FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_finite_are_refused(format: AudioFormat, bad: float) -> None:
    with pytest.raises(OmniError, match="not finite"):
        encode(np.array([0.0, bad], dtype=np.float32), format)


def _stream(format: AudioFormat, pieces: list[Samples]) -> list[bytes]:
    encoder = StreamEncoder(format)
    return [*(encoder.write(piece) for piece in pieces), encoder.close()]


def test_streamed_pcm_is_the_whole_encoding_in_pieces() -> None:
    tone = _tone(5_000)
    pieces = _stream("pcm16", np.array_split(tone, 7))
    assert b"".join(pieces) == encode(tone, "pcm16")
    assert [len(piece) for piece in pieces] == [2 * len(part) for part in np.array_split(tone, 7)] + [0]


def test_streamed_wav_has_its_header_in_the_first_piece_only() -> None:
    pieces = _stream("wav", np.array_split(_tone(5_000), 7))
    assert pieces[0].startswith(b"RIFF")
    assert b"".join(pieces)[44:] == encode(_tone(5_000), "pcm16")
    assert sum(piece.count(b"RIFF") for piece in pieces) == 1


def test_streamed_wav_is_read_by_the_wave_module() -> None:
    data = b"".join(_stream("wav", np.array_split(_tone(5_000), 7)))
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        assert file.readframes(file.getnframes()) == encode(_tone(5_000), "pcm16")


def test_streamed_wav_declares_sizes_that_fit_signed_32_bits() -> None:
    header = _stream("wav", [_tone(10)])[0]
    riff_size, data_size = int.from_bytes(header[4:8], "little"), int.from_bytes(header[40:44], "little")
    assert riff_size == 0x7FFFFFFF
    assert data_size == riff_size - 36


@pytest.mark.parametrize("num_pieces", [1, 7])
@pytest.mark.parametrize("format", AUDIO_FORMATS)
def test_a_file_that_is_written_in_pieces_and_taken_whole_is_the_whole_encoding(
    format: AudioFormat, num_pieces: int
) -> None:
    encoder = StreamEncoder(format, is_whole=True)
    for piece in np.array_split(_tone(36_000), num_pieces):
        assert encoder.write(piece) == b""
    assert encoder.num_kept <= len(data := encoder.close())
    if format in LOSSLESS:
        assert data == encode(_tone(36_000), format)
    assert len(read_audio(data) if format != "pcm16" else data) >= 36_000
    if format in FILE_FORMATS:
        assert soundfile.info(io.BytesIO(data)).frames == 36_000


def test_a_wav_stream_of_nothing_is_a_header() -> None:
    (header,) = _stream("wav", [])
    assert soundfile.info(io.BytesIO(header)).frames == 0


def _resembles(decoded: npt.NDArray[np.float64], wanted: npt.NDArray[np.float32]) -> bool:
    """At the delay that fits best, all but 1 % of the wanted power is there."""
    correlation = np.correlate(decoded, wanted.astype(np.float64))
    start = int(correlation.argmax())
    error = decoded[start : start + len(wanted)] - wanted
    return bool(np.mean(error**2) < 0.01 * np.mean(wanted**2))


def _chirp(num_samples: int) -> npt.NDArray[np.float32]:
    """From 200 Hz to 1 kHz: it fits itself at one delay only."""
    time = np.arange(num_samples) / 24_000
    phase = 2 * np.pi * (200 * time + 400 * time**2 / time[-1])
    return (0.5 * np.sin(phase)).astype(np.float32)


@pytest.mark.parametrize("num_pieces", [1, 7, 500])
@pytest.mark.parametrize("format", COMPRESSED)
def test_streamed_files_are_the_sound_between_some_silence(format: AudioFormat, num_pieces: int) -> None:
    sound = _chirp(12_000)
    decoded = read_audio(b"".join(_stream(format, np.array_split(sound, num_pieces)))) / 32768
    assert 12_000 <= len(decoded) <= 12_000 + 0.12 * 24_000
    assert _resembles(decoded, sound)


@pytest.mark.parametrize("num_pieces", [1, 20])
def test_streamed_opus_has_the_bytes_of_the_whole_file(num_pieces: int) -> None:
    sound = _chirp(48_000)
    assert b"".join(_stream("opus", np.array_split(sound, num_pieces))) == encode(sound, "opus")


@pytest.mark.parametrize("format", COMPRESSED)
def test_streamed_files_come_while_they_are_written(format: AudioFormat) -> None:
    """A second of noise in ten pieces: after each, all but 0.3 s of the file so far has left."""
    encoder = StreamEncoder(format)
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 24_000).astype(np.float32)
    sizes = np.cumsum([len(encoder.write(piece)) for piece in np.array_split(noise, 10)])
    total = sizes[-1] + len(encoder.close())
    for number in range(3, 10):
        assert sizes[number] > total * (number + 1 - 3) / 10 * 0.8


def test_two_mp3_streams_one_after_the_other_are_both_played() -> None:
    sounds = [_chirp(12_000), _chirp(12_000)[::-1]]
    pieces = [b"".join(_stream("mp3", [sound])) for sound in sounds]
    decoded, _ = soundfile.read(io.BytesIO(b"".join(pieces)))
    lengths = [len(soundfile.read(io.BytesIO(piece))[0]) for piece in pieces]
    assert len(decoded) == sum(lengths)
    assert _resembles(decoded[: lengths[0]], sounds[0])
    assert _resembles(decoded[lengths[0] :], sounds[1])


@pytest.mark.parametrize("format", COMPRESSED)
def test_a_compressed_stream_of_nothing_is_silence(format: AudioFormat) -> None:
    decoded = read_audio(b"".join(_stream(format, [])))
    assert np.abs(decoded).max(initial=0) < 0.001 * 32768


@pytest.mark.parametrize("format", COMPRESSED)
def test_an_encoder_that_is_given_up_frees_its_memory_at_once(
    format: AudioFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the garbage collector comes: it does not see FFmpeg's megabytes."""
    closed: list[str] = []

    class Container:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._real = opened(*arguments, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def close(self) -> None:
            closed.append(self._real.format.name)
            self._real.close()

    opened = av.open
    monkeypatch.setattr(av, "open", Container)
    encoder = StreamEncoder(format)
    encoder.write(_tone(5_000))
    assert not closed
    del encoder
    assert len(closed) == 1
