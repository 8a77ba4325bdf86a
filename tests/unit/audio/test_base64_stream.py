import base64
import random

import pytest

from omni_server.audio.base64_stream import Base64Stream


def _random_pieces(seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.choice([0, 1, 2, 3, 5, 6, 7, 48, 1001])) for _ in range(40)]


@pytest.mark.parametrize("seed", range(10))
def test_joined_pieces_are_the_base64_of_all_bytes(seed: int) -> None:
    pieces = _random_pieces(seed)
    stream = Base64Stream()
    text = "".join(stream.push(piece) for piece in pieces) + stream.flush()
    assert text == base64.b64encode(b"".join(pieces)).decode()


@pytest.mark.parametrize("seed", range(10))
def test_every_pushed_piece_decodes_alone_to_whole_samples(seed: int) -> None:
    stream = Base64Stream()
    for piece in _random_pieces(seed):
        text = stream.push(piece)
        assert "=" not in text
        assert len(base64.b64decode(text, validate=True)) % 6 == 0
