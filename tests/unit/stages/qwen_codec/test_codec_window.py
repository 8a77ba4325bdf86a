"""The metadata of a window. That the model rejects invalid windows is in code2wav/test_model.py."""

import pytest

from stages.qwen_codec.codec_window import CodecWindow, encode_frame

WINDOW = CodecWindow("a", 2, False, encode_frame((0, 2047)) + encode_frame((1, 300)))


@pytest.mark.parametrize("payload", [b"", b"junk", WINDOW.encode()[:-1], b"\x80"])
def test_other_bytes_are_no_window(payload: bytes) -> None:
    with pytest.raises(ValueError, match="not a codec window"):
        CodecWindow.decode(payload)


def test_as_many_frames_before_a_window_are_required_as_its_audio_depends_on() -> None:
    WINDOW.validate(4, num_codebooks=2, context_frames=2)
    WINDOW.validate(4, num_codebooks=2, context_frames=3)
    with pytest.raises(ValueError, match="past has 8 bytes; before frame 2 there must be 4"):
        WINDOW.validate(4, num_codebooks=2, context_frames=1)


def test_codes_beyond_16_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        encode_frame((2**15,))
