"""Frames of an event stream."""

import pytest
from pydantic import BaseModel

from omni_server.api.streaming import FrameTemplate, frame


class Delta(BaseModel):
    content: str


class Chunk(BaseModel):
    model: str
    delta: Delta
    usage: None = None


def chunk(text: str) -> Chunk:
    return Chunk(model='the string "the string"', delta=Delta(content=text), usage=None)


TEXTS = [
    "",
    "word",
    ' "quoted" \\ / ',
    "wörld 👋🏽",
    "\u2028\u2029\u0085",
    "\n\r\t\x00\x1f\x7f",
    "the string",
    "a" * 100_000,
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_frame_from_a_template_is_the_frame_of_the_model(text: str) -> None:
    assert FrameTemplate(chunk).frame(text) == frame(chunk(text))
