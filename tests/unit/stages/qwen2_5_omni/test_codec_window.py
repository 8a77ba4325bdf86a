"""The window that code2wav is told about."""

import msgspec
import pytest

from stages.qwen2_5_omni.codec_window import CodecWindow

VALID = CodecWindow(
    voice="Chelsie",
    noise_seed=2**64 - 1,
    first_code=24,
    emit_start=48,
    emit_end=60,
    vocoder_margin_frames=20,
    is_last=False,
)


def check(window: CodecWindow, num_codes: int = 48) -> None:
    window.validate(num_codes, codes_per_block=12, frames_per_code=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_code": -12}, "emit_start 48 to emit_end 60 is empty or outside the window -12 to 36"),
        ({"first_code": 25}, "first_code is 25; it must be a multiple of 12"),
        ({"emit_start": 23}, "emit_start 23 to emit_end 60 is empty or outside the window 24 to 72"),
        ({"emit_end": 48}, "emit_start 48 to emit_end 48 is empty"),
        ({"emit_end": 73}, "outside the window 24 to 72"),
        ({"vocoder_margin_frames": 49}, "48 mel frames before emit_start; the vocoder needs 49"),
        ({"emit_end": 63}, "18 mel frames after emit_end; the vocoder needs 20"),
        ({"is_last": True}, "the last window must be emitted to its end 72, not to 60"),
    ],
)
def test_a_wrong_number_is_named(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(msgspec.structs.replace(VALID, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"emit_start": 47}, "emit_start is 47; in a stream it must be a multiple of 12"),
        (
            {"emit_end": 59},
            "emit_end is 59; in a stream it must be a multiple of 12, except in the last window",
        ),
    ],
)
def test_windows_of_a_stream_meet_where_blocks_do(change: dict[str, int], message: str) -> None:
    window = msgspec.structs.replace(VALID, **change)
    check(window)
    with pytest.raises(ValueError, match=message):
        check(msgspec.structs.replace(window, stream="a"))


def test_the_last_window_of_a_stream_may_end_anywhere() -> None:
    check(msgspec.structs.replace(VALID, emit_end=71, is_last=True, stream="a"), num_codes=47)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="no codec tokens"):
        check(VALID, num_codes=0)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"junk",
        msgspec.msgpack.encode({"voice": "Chelsie"}),
        msgspec.msgpack.encode({**msgspec.structs.asdict(VALID), "first_code": "24"}),
        msgspec.msgpack.encode({**msgspec.structs.asdict(VALID), "extra": 1}),
    ],
)
def test_other_bytes_are_no_window(payload: bytes) -> None:
    with pytest.raises(ValueError, match="not a codec window"):
        CodecWindow.decode(payload)
