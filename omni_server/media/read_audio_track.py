"""Loaded by `limited_program`: decodes the first audio track of a file, FLAC and Ogg with libsndfile if that
can read all of it, else with FFmpeg.

The argument is FFmpeg's name of the format. The output is the sample rate, the number of channels and the
declared number of samples, 0 if unknown (`HEADER`), then the samples as float32 in the machine's byte order,
channels interleaved. The exit status is 0 or one of those below.

FFmpeg reads untrusted files, so it opens nothing here: formats and codecs are those listed, references out of
a file are not followed, and the operating system denies this process further files and sockets.
"""

import io
import re
import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import BinaryIO, NoReturn

import av
import av.subtitles.stream  # PyAV imports it on demand, when no file can be opened any more
import soundfile
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Discard

HEADER = struct.Struct("=IIQ")
DAMAGED, NO_AUDIO, EMPTY = 3, 4, 5

_BEGINNINGS = {"flac": rb"(?=fLaC\x00\x00\x00\x22)", "ogg": rb"(?=OggS\x00\x02)"}
"""The formats that libsndfile reads, and where each of several files joined to one begins: it would read only
the first. It reads MP3 as well, but no further than the header says, which may be that of a whole file of
which this is a part."""
_UNKNOWN_LENGTH = (1 << 63) - 1
"""libsndfile's `SF_COUNT_MAX`: the length of a FLAC file that was written to a pipe, which it cannot read."""
_BLOCK_SAMPLES = 1 << 16

_CODECS = (
    "aac,adpcm_ima_wav,adpcm_ms,alac,flac,g722,g726,gsm,gsm_ms,mp1float,mp2float,mp3,mp3float,opus,speex,"
    "pcm_alaw,pcm_f32be,pcm_f32le,pcm_f64be,pcm_f64le,pcm_mulaw,pcm_s16be,pcm_s16le,pcm_s24be,pcm_s24le,"
    "pcm_s32be,pcm_s32le,pcm_u8,vorbis"
)
_BOXES = (b"ftyp", b"styp", b"moov", b"mdat", b"moof", b"mfra", b"sidx", b"free", b"skip", b"wide", b"uuid")
"""Top-level boxes of MP4 files."""
_OPTIONS = {
    "codec_whitelist": _CODECS,  # also while FFmpeg probes the streams, so it decodes no image
    "enable_drefs": "0",  # MP4: samples in other files
    "max_streams": "64",
    "protocol_whitelist": "none",
}


def read(file: BinaryIO, output: BinaryIO, arguments: Sequence[str]) -> int:
    (demuxer,) = arguments
    try:
        if _read_with_libsndfile(file, demuxer, output):
            return 0
        if _is_cut_short(file, demuxer):
            return DAMAGED
        file.seek(0)
        return _decode(file, demuxer, output)
    except Exception:  # noqa: BLE001 - decoders raise errors of many kinds, all of which mean the file
        return DAMAGED


def _read_with_libsndfile(file: BinaryIO, demuxer: str, output: BinaryIO) -> bool:
    """FFmpeg's Vorbis ends up to 16 ms too early or too late, its Opus is always decoded at 48 kHz, and it
    loses frames where FLAC files are joined.

    Returns False, with nothing written, if FFmpeg has to read the file.
    """
    if demuxer not in _BEGINNINGS:
        return False
    try:
        files = filter(None, re.split(_BEGINNINGS[demuxer], file.read()))
        joined = [soundfile.SoundFile(io.BytesIO(data)) for data in files]
    except soundfile.SoundFileError:
        return False
    is_alike = len({(part.samplerate, part.channels) for part in joined}) == 1
    num_samples = [part.frames for part in joined]
    if not is_alike or not all(0 < number < _UNKNOWN_LENGTH for number in num_samples):
        return False
    output.write(HEADER.pack(joined[0].samplerate, joined[0].channels, sum(num_samples)))
    for part in joined:
        for block in part.blocks(_BLOCK_SAMPLES, dtype="float32", always_2d=True):
            output.write(block.data)
    return True


def _refuse(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    raise PermissionError("a file refers to another one")


def _decode(file: BinaryIO, demuxer: str, output: BinaryIO) -> int:
    with av.open(
        file, "r", format=demuxer, options=_OPTIONS, metadata_errors="replace", io_open=_refuse
    ) as opened:
        if not opened.streams.audio:
            return NO_AUDIO
        chosen = opened.streams.audio[0]
        if chosen.codec_context is None or chosen.codec_context.name not in _CODECS.split(","):
            return DAMAGED
        for stream in opened.streams:
            if stream.index != chosen.index:
                stream.discard = Discard.all
        chosen.codec_context.thread_count = 1
        to_float = av.AudioResampler(format="flt")
        num_written = 0
        for frame, num_samples in _frames(opened, chosen, demuxer):
            (converted,) = to_float.resample(frame)
            num_channels = converted.layout.nb_channels
            if not num_written:
                output.write(HEADER.pack(converted.sample_rate, num_channels, 0))
            output.write(memoryview(converted.planes[0])[: 4 * num_channels * num_samples])
            num_written += num_samples
        return 0 if num_written else EMPTY


def _frames(opened: InputContainer, stream: AudioStream, demuxer: str) -> Iterator[tuple[AudioFrame, int]]:
    """Yields frames with their number of valid samples. Leaves out what cannot be decoded, as players do: the
    last frame of an MP3 or AAC file that was cut, or the first one after the place where two were joined.
    Raises `ValueError` if a packet is shorter than declared, and if none can be decoded.

    AAC frames have a fixed length: in MP4, the last one's duration says how much of it is audio. Times that
    are not in samples, such as WebM's ms, are too coarse; there FFmpeg has trimmed the frame itself.
    """
    last: AudioFrame | None = None
    is_empty = True
    for packet in opened.demux(stream):
        if packet.is_corrupt and demuxer != "wav":  # where packets have any length, and the last one the rest
            raise ValueError("a packet is cut short")
        is_empty = is_empty and not packet.size
        try:
            frames = packet.decode()
        except av.InvalidDataError:
            continue
        for frame in frames:
            if last is not None:
                yield last, last.samples
            last = frame
    if last is None and not is_empty:
        raise ValueError("no packet can be decoded")
    if last is not None:
        is_exact = stream.time_base == Fraction(1, last.sample_rate)
        declared = last.duration if is_exact else 0
        yield last, min(declared or last.samples, last.samples)


def _is_cut_short(file: BinaryIO, demuxer: str) -> bool:
    """Whether an MP4 or Matroska file is shorter than it declares; a live recording declares nothing. FFmpeg
    decodes both."""
    file_size = file.seek(0, io.SEEK_END)
    file.seek(0)
    end_of = _end_of_element if demuxer == "matroska" else _end_of_box
    position = 0
    while position < file_size:
        end = end_of(file)
        if end is None:
            return False
        position = file.seek(end)
    return position > file_size


def _end_of_box(file: BinaryIO) -> int | None:
    """End of the MP4 box that begins at the file's position; None if undeclared."""
    start = file.tell()
    header = file.read(16)
    if header[4:8] not in _BOXES:
        return None  # a recorder's own box, or not MP4
    size = int.from_bytes(header[:4])
    if size == 1:
        size = int.from_bytes(header[8:])
    return start + size if size >= 8 else None


def _end_of_element(file: BinaryIO) -> int | None:
    """End of one of Matroska's two top-level elements; None if another or undeclared."""
    if file.read(4) not in (b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"):
        return None
    first = file.read(1)
    num_more = 8 - first[0].bit_length() if first and first[0] else 0
    size = int.from_bytes(first + file.read(num_more))
    unknown = (1 << 7 * (num_more + 1)) - 1
    return file.tell() + (size & unknown) if size & unknown != unknown else None
