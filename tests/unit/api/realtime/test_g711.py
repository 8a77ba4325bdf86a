"""G.711 in both laws."""

import numpy as np
import pytest

from omni_server.api.realtime.audio_format import decode_g711, encode_g711
from omni_server.api.realtime.session_config import Law


@pytest.mark.parametrize(
    ("law", "code", "sample"),
    # ITU-T G.711: the largest and the smallest values, and silence.
    [
        ("ULAW", 0x80, 32124),
        ("ULAW", 0x00, -32124),
        ("ULAW", 0xFF, 0),
        ("ALAW", 0xAA, 32256),
        ("ALAW", 0xD5, 8),
    ],
)
def test_codes_mean_what_the_standard_says(law: Law, code: int, sample: int) -> None:
    assert decode_g711(bytes([code]), law).tolist() == [sample]


@pytest.mark.parametrize("law", ["ULAW", "ALAW"])
def test_every_sample_comes_back_close(law: Law) -> None:
    samples = np.arange(-32768, 32768).astype(np.int16)
    back = decode_g711(encode_g711(samples, law), law).astype(int)
    assert np.all(np.abs(back - samples) <= np.abs(samples.astype(int)) / 16 + 16)
    assert np.array_equal(decode_g711(encode_g711(back.astype(np.int16), law), law), back)
