"""Files of every kind, changed at random from fixed seeds: each is decoded within the limits, or refused.

`OMNI_FUZZ_ROUNDS` makes more of the changes that are made in this process, each from a seed of its own.
"""

import asyncio
import base64
import io
import json
import os
import random
import socket
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
import soundfile
from PIL import Image

from omni_server.errors import InvalidRequestError
from omni_server.media import limited_process, read_audio_track, read_image
from omni_server.media.audio import count_samples, decode_audio
from omni_server.media.image import decode_image
from omni_server.media.limited_process import Program
from omni_server.media.limited_program import Read
from omni_server.media.limits import MediaLimits
from omni_server.media.source import MediaSource, decode_base64
from omni_server.media.video import decode_video
from tests.unit.media.containers import record

pillow_heif.register_heif_opener()

LIMITS = MediaLimits(
    max_bytes=1 << 20,
    max_audio_seconds=20.0,
    max_image_pixels=200_000,
    max_video_pixels=6 * 84 * 112,
    max_video_frame_pixels=20_000,
)
ROUNDS = int(os.environ.get("OMNI_FUZZ_ROUNDS", "500"))
SLOW_ROUNDS = 12
"""Each starts a process."""

MEDIA = Path(__file__).parents[2] / "data" / "media"
NUMBERS = (
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\x80\0\0\0",
    b"\0\0\0\x80",
    b"\1\0\0\0",
)


def _change(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """One to eight changes, most of them near the start, where headers are."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        size = max(len(changed), 1)
        at = rng.randrange(min(size, rng.choice((64, 256, size))))
        match rng.randrange(8):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                changed[at : at + 1] = bytes([changed[at] ^ 1 << rng.randrange(8)]) if changed else b"\0"
            case 2:
                changed[at : at + 4] = rng.choice(NUMBERS)
            case 3:
                changed[at : at + 2] = rng.choice(NUMBERS)[:2]
            case 4:
                del changed[at : at + rng.choice((1, 4, 100, size))]
            case 5:
                changed[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
            case 6:
                changed[at:at] = changed[at : at + rng.choice((8, 100, 1000))]
            case 7:
                begin = rng.randrange(len(other))
                changed[at : at + 100] = other[begin : begin + rng.choice((8, 100, 1000))]
    return bytes(changed)


def _with_checksums(png: bytes) -> bytes:
    """The same with right ones, as far as its chunks go: with wrong ones it would not be read further."""
    fixed, start = bytearray(png), 8
    while start + 12 <= len(png):
        end = start + 8 + int.from_bytes(png[start : start + 4])
        if end + 4 > len(png):
            break
        fixed[end : end + 4] = zlib.crc32(png[start + 4 : end]).to_bytes(4)
        start = end + 4
    return bytes(fixed)


def _sound(format: str, subtype: str | None = None, num_channels: int = 2) -> bytes:
    samples, rate = soundfile.read(MEDIA / "speech_hello.wav", dtype="float32")
    file = io.BytesIO()
    channels = np.stack(num_channels * [samples[:8_000]], axis=1)
    soundfile.write(file, channels, rate, subtype=subtype, format=format)
    return file.getvalue()


def _picture(format: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"exif": exif} if format in ("JPEG", "PNG", "WEBP") else {}
    with Image.open(MEDIA / "shapes.png") as image:
        image.convert(mode).save(file, format, **options)
    return file.getvalue()


@cache
def _corpus(kind: str) -> dict[str, bytes]:
    sounds = {
        "wav": _sound("WAV"),
        "float wav": _sound("WAV", "FLOAT"),
        "adpcm wav": _sound("WAV", "IMA_ADPCM"),
        "extensible wav": _sound("WAVEX"),
        "rf64": _sound("RF64"),
        "flac": _sound("FLAC"),
        "vorbis": _sound("OGG", "VORBIS"),
        "opus": _sound("OGG", "OPUS"),
        "mp3": _sound("MP3"),
        "aac": record("adts", "aac", np.sin(np.arange(8_000) / 20)[None].astype(np.float32), 16_000),
        "gsm wav": _sound("WAV", "GSM610", 1),
    }
    pictures = {format.lower(): _picture(format) for format in ("PNG", "JPEG", "WEBP", "GIF", "BMP")}
    pictures |= {f"{mode} png": _picture("PNG", mode) for mode in ("RGBA", "P", "L", "1", "I;16")}
    pictures |= {"cmyk jpeg": _picture("JPEG", "CMYK"), "rgba webp": _picture("WEBP", "RGBA")}
    return {"sound": sounds, "picture": pictures}[kind]


def _decode_sound(data: bytes) -> None:
    part = decode_audio(data, LIMITS)
    assert part.samples.size <= LIMITS.max_audio_seconds * part.sample_rate_hz
    assert part.samples.dtype == np.float32
    assert np.abs(part.samples).max() < 4.0  # files have at most 1.0, to which resampling adds
    assert count_samples(data, LIMITS) >= part.samples.size


def _decode_picture(data: bytes) -> None:
    pixels = decode_image(data, LIMITS).pixels
    assert pixels.shape[0] * pixels.shape[1] <= LIMITS.max_image_pixels
    assert (pixels.shape[2], pixels.dtype) == (3, np.uint8)


def _decode_video(data: bytes) -> None:
    frames = decode_video(data, LIMITS).frames
    assert 1 <= frames[..., 0].size <= LIMITS.max_video_pixels
    assert frames.shape[3] == 3


def _is_decoded(decode: Callable[[bytes], None], data: bytes) -> bool:
    refusal: InvalidRequestError | None = None
    try:
        decode(data)
    except InvalidRequestError as error:
        refusal = error
    if refusal is not None:
        assert refusal.param is None
        assert len(refusal.message) < 200
    return refusal is None


def _serve(read: Read, control: socket.socket) -> None:
    """Reads each file as `ReaderProcesses` does, in this process."""
    with control:
        while True:
            job, files, _, _ = socket.recv_fds(control, 1 << 16, 4)
            if not job:
                return
            with (
                os.fdopen(files[0], "rb") as file,
                os.fdopen(files[2], "wb"),
                socket.socket(fileno=files[3]) as caller,
                suppress(OSError),  # of a caller who has enough
            ):
                with os.fdopen(files[1], "wb") as output:
                    status = read(file, output, json.loads(job)[2:])
                caller.send(str(status).encode())


def _launch(read: Read, control: socket.socket) -> Callable[[], object]:
    thread = threading.Thread(target=_serve, args=(read, control.dup()), daemon=True)
    thread.start()
    return thread.join


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Thousands of processes would take minutes."""
    programs = {
        Path(module.__file__): Program(partial(_launch, module.read))
        for module in (read_audio_track, read_image)
    }
    monkeypatch.setattr(limited_process, "_programs", programs)
    monkeypatch.setattr(read_image, "_allow", lambda *_: None)  # limits of the process
    yield
    for program in programs.values():
        program.end()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in ("sound", "picture") for name in _corpus(kind)]
)
def test_changed_files_are_decoded_or_refused(kind: str, name: str) -> None:
    corpus = _corpus(kind)
    decode = {"sound": _decode_sound, "picture": _decode_picture}[kind]
    decode(corpus[name])
    others = list(corpus.values())
    outcomes = set()
    for seed in range(ROUNDS):
        rng = random.Random(f"{name} {seed}")
        with warnings.catch_warnings(action="ignore"):  # Pillow's, of what it forgives
            changed = _change(rng, corpus[name], rng.choice(others))
            outcomes.add(_is_decoded(decode, _with_checksums(changed) if name.endswith("png") else changed))
    assert outcomes == {True, False}


@pytest.mark.parametrize("name", ["video", "webm sound", "mp4 sound", "avif picture", "heif picture"])
def test_changed_files_are_decoded_in_their_process_or_refused(name: str) -> None:
    tone = np.sin(np.arange(24_000) / 20)[None].astype(np.float32)
    data = {
        "video": lambda: (MEDIA / "ball.mp4").read_bytes(),
        "webm sound": lambda: record("webm", "libopus", tone, 48_000),
        "mp4 sound": lambda: record("mp4", "aac", tone, 16_000),
        "avif picture": lambda: _picture("AVIF"),
        "heif picture": lambda: _picture("HEIF"),
    }[name]()
    decode = {"video": _decode_video, "sound": _decode_sound, "picture": _decode_picture}[name.split()[-1]]
    decode(data)
    outcomes = set()
    for seed in range(SLOW_ROUNDS):
        outcomes.add(_is_decoded(decode, _change(random.Random(f"{name} {seed}"), data, data)))
    assert False in outcomes


def _read_url(data: bytes) -> None:
    read = asyncio.run(MediaSource((), LIMITS).read(data.decode("utf-8", errors="replace")))
    assert 0 < len(read) <= LIMITS.max_bytes


def _read_base64(data: bytes) -> None:
    text = data.decode("utf-8", errors="replace")
    assert base64.b64encode(decode_base64(text)).decode() == "".join(text.split())


@pytest.mark.parametrize(("start", "read"), [(b"", _read_base64), (b"data:audio/wav;base64,", _read_url)])
def test_changed_base64_and_data_urls_are_read_or_refused(
    start: bytes, read: Callable[[bytes], None]
) -> None:
    text = start + base64.b64encode(bytes(range(255)))
    outcomes = set()
    for seed in range(ROUNDS):
        outcomes.add(_is_decoded(read, _change(random.Random(f"{start!r} {seed}"), text, b"%41\n =/\xff")))
    assert outcomes == {True, False}
