"""Images that nobody honest sends end alone, without what others need."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from omni_server.errors import InvalidRequestError
from omni_server.media.image import count_pixels, decode_image
from omni_server.media.limited_process import end_programs
from omni_server.media.limits import MediaLimits
from tests.unit.media.image_bombs import app5_markers, comment_in_pieces, empty_scans, private_chunks

LIMITS = MediaLimits()


@pytest.fixture(autouse=True)
def programs() -> Iterator[None]:
    """Those of other tests do not run."""
    end_programs()
    yield
    end_programs()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _num_processes() -> int:
    """Of the program for images: those with a file, and the one that waits."""
    command_lines = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in _children(os.getpid())}
    (program,) = (child for child, line in command_lines.items() if b"read_image.py" in line)
    return len(_children(program))


@pytest.mark.parametrize(
    ("make", "is_read"),
    [
        (partial(empty_scans, 4_000), [decode_image]),
        (partial(app5_markers, 8_000_000), [decode_image, count_pixels]),
        (partial(private_chunks, 4_000_000), [decode_image, count_pixels]),
        (partial(comment_in_pieces, 16_000_000), [decode_image, count_pixels]),
    ],
    ids=["scans", "markers", "chunks", "comment"],
)
def test_a_file_that_takes_too_much_is_refused_and_its_process_gone(
    make: Callable[[], bytes], is_read: list[Callable[[bytes, MediaLimits], object]]
) -> None:
    data = make()
    for read in is_read:
        with pytest.raises(InvalidRequestError) as caught:
            read(data, LIMITS)
        assert caught.value.code == "invalid_image"
        assert _num_processes() == 1


def test_a_few_empty_scans_are_an_image() -> None:
    assert decode_image(empty_scans(3), LIMITS).pixels.shape == (7_056, 7_056, 3)
