"""Small or ordinary-looking image files that take a decoder much time or memory."""

import struct
import zlib

_SIDE = 7_056
"""Just below the 50 million pixels that are allowed."""


def empty_scans(number: int) -> bytes:
    """A progressive JPEG, grey, with many scans that change nothing: each goes over all blocks."""
    num_blocks = (_SIDE // 8) ** 2
    runs = []
    while num_blocks:  # "the next n blocks are empty", n in 14 bits above 1 << 14
        run = min(num_blocks, (1 << 15) - 1)
        runs.append(f"0{run - (1 << 14):014b}")
        num_blocks -= run
    scan = _segment(0xDA, b"\1\1\0\1\x3f\0") + _bits("".join(runs))
    return b"".join(
        [
            b"\xff\xd8",
            _segment(0xDB, b"\0" + b"\1" * 64),
            _segment(0xC2, struct.pack(">BHHB", 8, _SIDE, _SIDE, 1) + b"\1\x11\0"),
            _segment(0xC4, b"\0\1" + bytes(15) + b"\0"),  # DC: one code, no difference
            _segment(0xC4, b"\x10\1" + bytes(15) + b"\xe0"),  # AC: one code, a run of empty blocks
            _segment(0xDA, b"\1\1\0\0\0\0") + bytes((_SIDE // 8) ** 2 // 8 + 1),
            scan * number,
            b"\xff\xd9",
        ]
    )


def app5_markers(number: int) -> bytes:
    """A JPEG with so many segments before its picture."""
    return b"\xff\xd8" + _segment(0xE5, b"") * number + b"\xff\xd9"


def private_chunks(number: int) -> bytes:
    """A PNG with so many chunks before its picture."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + _chunk(b"prVt", b"") * number


def comment_in_pieces(number: int) -> bytes:
    """A GIF whose comment comes in so many blocks of two bytes."""
    screen = struct.pack("<HHBBB", 8, 8, 0x80, 0, 0) + bytes(6)
    return b"GIF89a" + screen + b"!\xfe" + b"\2ab" * number + b"\0;"


def _segment(kind: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, kind, len(data) + 2) + data


def _bits(bits: str) -> bytes:
    padded = bits + "1" * (-len(bits) % 8)
    return int(padded, 2).to_bytes(len(padded) // 8).replace(b"\xff", b"\xff\0")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
