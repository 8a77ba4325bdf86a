import base64

import pytest

from omni_server.errors import InvalidRequestError
from omni_server.media.source import decode_base64

ALL_BYTES = bytes(range(256))


def test_standard_base64_is_decoded() -> None:
    assert decode_base64(base64.b64encode(ALL_BYTES).decode()) == ALL_BYTES


def test_ascii_whitespace_is_ignored() -> None:
    assert decode_base64(" " + base64.encodebytes(ALL_BYTES).decode().replace("\n", "\r\n\t")) == ALL_BYTES


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "=",
        "====",
        "A",
        "QUJD=",
        "QUJD====",
        "QUI=====",
        "QUJDQ===",
        "QUI=QUI=",
        "QUI",  # padding is missing
        "QUI==",
        "QU=I",
        "QUJDQQ==QUJD",
        "QUJD!",
        "QUJD,QUJD",
        "-_-_",  # the URL alphabet
        "data:audio/wav;base64,QUJD",
        "QUJ\u00c4",
        "QUJ\uff21",
        "QUJD\u00a0",
        "QUJD\0",
    ],
)
def test_all_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_base64(text)
    assert caught.value.code == "invalid_base64"
    assert caught.value.param is None
    assert "base64" in caught.value.message
