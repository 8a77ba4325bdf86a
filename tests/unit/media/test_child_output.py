"""A decoding process that says what no decoder says, as one would that a file has taken over."""

from pathlib import Path

import pytest

from omni_server.errors import InvalidRequestError
from omni_server.media import audio, read_audio_track
from omni_server.media.limits import MediaLimits


@pytest.mark.parametrize(
    ("rate", "num_channels", "message"),
    [(16_000, 0, "no channel"), (16_000, 2**32 - 1, "channels"), (0, 1, "sample rate")],
)
def test_sound_of_no_possible_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: int, num_channels: int, message: str
) -> None:
    """No channel was a division by zero; found by letting a process write at random."""
    program = tmp_path / "reader.py"
    program.write_text(
        "def read(file, output, arguments):\n"
        f"    output.write({read_audio_track.HEADER.pack(rate, num_channels, 0)!r} + bytes(64))\n"
        "    return 0\n"
    )
    monkeypatch.setattr(audio, "_MODULE", program)
    with pytest.raises(InvalidRequestError, match=message):
        audio.decode_audio(b"\0\0\0\x18ftypmp42", MediaLimits())
