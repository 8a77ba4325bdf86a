"""Recognises the formats of audio and video files by their first bytes."""

VIDEO_DEMUXERS = ("avi", "matroska", "mov")


def demuxer_of(data: bytes) -> str | None:
    """Returns FFmpeg's name for the format of a file, or None if this server does not read it.

    FFmpeg is told the format and does not guess it: there are playlists among the formats that it knows, and
    it would open the files and URLs that they name.
    """
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[4:8] == b"ftyp":
        return "mov"
    if data[:4] in (b"RIFF", b"RIFX", b"RF64"):
        return {b"WAVE": "wav", b"AVI ": "avi"}.get(data[8:12])
    if data[:4] == b"fLaC":
        return "flac"
    if data[:4] == b"OggS":
        return "ogg"
    if data[:3] == b"ID3":
        size = sum(byte << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=False))
        return demuxer_of(data[10 + size : 22 + size]) or "mp3"
    return _demuxer_of_frames(data)


def _demuxer_of_frames(data: bytes) -> str | None:
    """MPEG audio has no file header. Its frames begin with twelve set bits (MPEG-2.5: eleven), the version
    and the layer, which is 0 in AAC."""
    if len(data) < 2 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return None
    return "aac" if data[1] & 0xF6 == 0xF0 else "mp3"
