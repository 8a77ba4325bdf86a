import io
import random
import struct
import tracemalloc
import zlib

import numpy as np
import numpy.typing as npt
import pillow_heif
import pytest
from PIL import Image, ImageOps

from omni_server.errors import InvalidRequestError
from omni_server.media.image import decode_image
from omni_server.media.limits import MediaLimits

pillow_heif.register_heif_opener()

LIMITS = MediaLimits()
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def _file(image: Image.Image, format: str = "PNG", exif: Image.Exif | None = None) -> bytes:
    file = io.BytesIO()
    image.save(file, format=format, exif=(Image.Exif() if exif is None else exif).tobytes())
    return file.getvalue()


def _gradient(width: int = 60, height: int = 40) -> Image.Image:
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([4 * x, 6 * y, 2 * (x + y)], axis=2).astype(np.uint8))


def _refusal(data: bytes, limits: MediaLimits = LIMITS) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        decode_image(data, limits)
    assert caught.value.code == "invalid_image"
    assert caught.value.param is None
    return caught.value.message


@pytest.mark.parametrize("format", ["PNG", "BMP", "GIF", "JPEG", "WEBP", "AVIF", "HEIF"])
def test_formats_are_read(format: str) -> None:
    pixels = decode_image(_file(_gradient(), format), LIMITS).pixels
    assert pixels.dtype == np.uint8
    assert pixels.shape == (40, 60, 3)
    error = np.abs(pixels.astype(int) - np.asarray(_gradient()).astype(int)).mean()
    assert error < (1e-9 if format in ("PNG", "BMP") else 8)


@pytest.mark.parametrize(("format", "brand"), [("AVIF", b"avif"), ("HEIF", b"heic")])
def test_a_container_without_a_codec_in_its_brand_is_read(format: str, brand: bytes) -> None:
    data = _file(_gradient(), format)
    assert data[4:12] == b"ftyp" + brand
    _check_is_gradient(decode_image(data.replace(brand, b"mif1", 1), LIMITS).pixels)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "I;16"])
def test_a_white_picture_is_white_in_every_png_mode(mode: str) -> None:
    white = (
        Image.new("I;16", (8, 6), 0xFFFF)
        if mode == "I;16"
        else Image.new("RGB", (8, 6), "white").convert(mode)
    )
    pixels = decode_image(_file(white), LIMITS).pixels
    assert pixels.shape == (6, 8, 3)
    assert (pixels == 255).all()


def test_16_bit_grey_keeps_its_shades() -> None:
    shades = np.array([[0, 0x4000, 0x8000, 0xC000, 0xFFFF]], dtype=np.uint16)
    pixels = decode_image(_file(Image.fromarray(shades)), LIMITS).pixels
    assert pixels[0, :, 0].tolist() == [0, 64, 128, 192, 255]


def test_cmyk_jpeg_becomes_rgb() -> None:
    data = _file(Image.new("RGB", (16, 16), RED).convert("CMYK"), "JPEG")
    assert np.abs(decode_image(data, LIMITS).pixels[8, 8].astype(int) - RED).max() < 8


def test_transparency_is_laid_over_white() -> None:
    image = Image.new("RGBA", (3, 1))
    image.putdata([(255, 0, 0, 255), (255, 0, 0, 0), (0, 0, 0, 128)])
    pixels = decode_image(_file(image), LIMITS).pixels
    assert pixels[0, :2].tolist() == [list(RED), list(WHITE)]
    assert np.abs(pixels[0, 2].astype(int) - 127).max() <= 1


@pytest.mark.parametrize("format", ["WEBP", "AVIF", "HEIF"])
def test_transparency_of_other_formats_is_laid_over_white(format: str) -> None:
    image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    assert (decode_image(_file(image, format), LIMITS).pixels > 250).all()


def test_a_transparent_palette_entry_is_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    file = io.BytesIO()
    image.save(file, format="PNG", transparency=0)
    assert decode_image(file.getvalue(), LIMITS).pixels[0].tolist() == [list(WHITE), list(BLUE)]


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "AVIF", "HEIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(format: str, orientation: int) -> None:
    pixels = decode_image(_turned(format, orientation), LIMITS).pixels
    _check_is_gradient(pixels, orientation)


@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_phone_s_file_that_says_twice_how_it_is_turned_is_turned_once(
    format: str, orientation: int
) -> None:
    """The container counts; EXIF repeats it, or says what was applied before."""
    exif = Image.Exif()
    exif[0x0113] = 6
    data = _turned(format, orientation, exif)
    assert data.count(b"\x01\x13\0\3") == 1
    pixels = decode_image(data.replace(b"\x01\x13\0\3", b"\x01\x12\0\3"), LIMITS).pixels
    _check_is_gradient(pixels, orientation)


def _turned(format: str, orientation: int, exif: Image.Exif | None = None) -> bytes:
    exif = Image.Exif() if exif is None else exif
    exif[0x0112] = orientation
    return _file(_gradient(), format, exif)


def _check_is_gradient(pixels: npt.NDArray[np.uint8], orientation: int = 1) -> None:
    turned = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(_turned("PNG", orientation)))))
    assert pixels.shape == turned.shape
    assert np.abs(pixels.astype(int) - turned.astype(int)).mean() < 8


def test_an_animation_gives_its_first_frame() -> None:
    file = io.BytesIO()
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, GREEN, BLUE)]
    frames[0].save(file, format="GIF", save_all=True, append_images=frames[1:])
    assert (decode_image(file.getvalue(), LIMITS).pixels == RED).all()


def _png_declaring(width: int, height: int) -> bytes:
    """A small PNG whose header, with a correct checksum, declares another size."""
    data = bytearray(_file(_gradient()))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


@pytest.mark.parametrize(
    "size", [(7_072, 7_072), (13_000, 13_000), (30_000, 30_000), (0x7FFFFFFF, 0x7FFFFFFF)]
)
def test_huge_dimensions_are_refused_by_the_header(size: tuple[int, int]) -> None:
    assert "50000000" in _refusal(_png_declaring(*size))


@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
@pytest.mark.parametrize("size", [(7_072, 7_072), (13_000, 13_000)])
def test_huge_dimensions_of_a_container_are_refused_before_it_is_decoded(
    format: str, size: tuple[int, int]
) -> None:
    before, kind, after = _file(_gradient(64, 64), format).partition(b"ispe\0\0\0\0")
    assert after.startswith(struct.pack(">II", 64, 64))
    assert "50000000" in _refusal(before + kind + struct.pack(">II", *size) + after[8:])


def test_pixels_up_to_the_limit_are_taken() -> None:
    data = _file(_gradient())
    assert decode_image(data, MediaLimits(max_image_pixels=2_400)).pixels.shape == (40, 60, 3)
    assert "more than the 2399 pixels allowed" in _refusal(data, MediaLimits(max_image_pixels=2_399))


def test_extreme_aspect_ratios_are_refused() -> None:
    assert decode_image(_file(Image.new("RGB", (200, 1))), LIMITS).pixels.shape == (1, 200, 3)
    assert "aspect ratio" in _refusal(_file(Image.new("RGB", (201, 1))))
    assert "aspect ratio" in _refusal(_file(Image.new("RGB", (1, 201))))


def test_more_bytes_than_allowed_are_refused() -> None:
    data = _file(_gradient())
    decode_image(data, MediaLimits(max_bytes=len(data)))
    assert "bytes allowed" in _refusal(data, MediaLimits(max_bytes=len(data) - 1))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "AVIF", "HEIF"])
def test_a_photo_of_60_mb_is_read(format: str) -> None:
    data = _file(_gradient(), format)
    assert decode_image(data + bytes(60_000_000 - len(data)), LIMITS).pixels.shape == (40, 60, 3)


@pytest.mark.parametrize("is_last", [False, True], ids=["before the pixels", "behind them"])
@pytest.mark.parametrize(
    ("kind", "head"),
    [(b"zTXt", b"a\0\0"), (b"iTXt", b"a\0\1\0\0\0"), (b"iCCP", b"a\0\0")],
    ids=["zTXt", "iTXt", "iCCP"],
)
def test_text_that_unpacks_to_much_is_refused_for_what_it_is(
    kind: bytes, head: bytes, *, is_last: bool
) -> None:
    packer = zlib.compressobj()
    body = head + b"".join(packer.compress(bytes(1 << 20)) for _ in range(300)) + packer.flush()
    chunk = struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    file = _file(_gradient())
    position = len(file) - 12 if is_last else 33
    tracemalloc.start()
    try:
        message = _refusal(file[:position] + chunk + file[position:])
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message == "The image holds text or a colour profile that unpacks to more than 1 MiB."
    assert most < 8 << 20


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "AVIF", "HEIF"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_truncated_pictures_are_refused(format: str, share: float) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))
    data = _file(noise, format)
    _refusal(data[: int(share * len(data))])


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff",
        b"GIF89a",
        b"RIFF\0\0\0\0WEBP",
        b"BM",
        *[b"\0\0\0\x14ftyp" + brand + bytes(4) + brand for brand in (b"avif", b"heic", b"mif1", b"msf1")],
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_are_refused_in_plain_words(start: bytes, seed: int) -> None:
    message = _refusal(start + random.Random(seed).randbytes(3_000))
    assert message.startswith("The image ")
    assert not any(word in message.lower() for word in ("pil", "bytesio", "0x", "/"))


@pytest.mark.parametrize("format", ["TIFF", "ICO", "PPM", "TGA"])
def test_other_formats_are_refused(format: str) -> None:
    file = io.BytesIO()
    _gradient().save(file, format=format)
    assert "known format" in _refusal(file.getvalue())


def test_a_vector_drawing_is_refused() -> None:
    _refusal(b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/hostname"/></svg>')
