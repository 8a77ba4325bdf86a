"""`file:` URLs: of one folder only, whatever the path looks like."""

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.media.limits import MediaLimits
from omni_server.media.source import MediaSource

LIMITS = MediaLimits(max_bytes=100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    (folder / "sub").mkdir(parents=True)
    (folder / "a b.wav").write_bytes(b"inside")
    (folder / "sub" / "b.wav").write_bytes(b"deeper")
    (folder / "inner-link.wav").symlink_to(folder / "sub" / "b.wav")
    (tmp_path / "secret.txt").write_bytes(b"secret")
    (tmp_path / "media-next").mkdir()
    (tmp_path / "media-next" / "c.wav").write_bytes(b"neighbour")
    return folder


async def read(folder: Path | None, url: str) -> bytes:
    return await MediaSource((), LIMITS, folder).read(url)


async def test_files_of_the_folder_are_read(folder: Path) -> None:
    assert await read(folder, f"file://{folder}/a%20b.wav") == b"inside"
    assert await read(folder, f"file://localhost{folder}/sub/b.wav") == b"deeper"
    assert await read(folder, f"FILE:{folder}/sub/../a%20b.wav") == b"inside"
    assert await read(folder, f"file://{folder}/inner-link.wav") == b"deeper"


async def test_without_a_folder_there_are_no_file_urls(folder: Path) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await read(None, f"file://{folder}/a%20b.wav")
    assert caught.value.code == "media_not_allowed"


@pytest.mark.parametrize(
    "path",
    [
        "{folder}/../secret.txt",
        "{folder}/%2e%2e/secret.txt",
        "{folder}/sub/../../secret.txt",
        "{folder}/../media-next/c.wav",
        "{folder}-next/c.wav",
        "{folder}/link.txt",
        "{folder}/link-to-folder/secret.txt",
        "/etc/passwd",
        "/proc/self/environ",
        "/dev/zero",
        "{folder}/missing.wav",
        "{folder}/sub",
        "{folder}",
        "{folder}/pipe",
        "{folder}/a%00b.wav",
    ],
)
async def test_nothing_else_is_read_and_nothing_is_told_of_it(path: str, folder: Path) -> None:
    (folder / "link.txt").symlink_to(folder.parent / "secret.txt")
    (folder / "link-to-folder").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe")
    with pytest.raises(InvalidRequestError) as caught:
        await read(folder, "file://" + path.format(folder=folder))
    assert caught.value.code == "media_not_allowed"
    assert "secret" not in caught.value.message


def test_what_is_not_allowed_is_not_even_opened(folder: Path) -> None:
    """A writer of a pipe waits until somebody opens it for reading; opening a device may do anything."""
    pipe = folder.parent / "pipe"
    os.mkfifo(pipe)
    (folder / "link").symlink_to(pipe)
    writer = threading.Thread(target=lambda: os.close(os.open(pipe, os.O_WRONLY)))
    writer.start()
    try:
        status = Path(f"/proc/self/task/{writer.native_id}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "S":  # asleep, in `open`
            time.sleep(0.001)
        for path in (pipe, folder / "link"):
            with pytest.raises(InvalidRequestError):
                asyncio.run(read(folder, f"file://{path}"))
        writer.join(0.05)
        assert writer.is_alive()
    finally:
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        writer.join()
        os.close(reader)


@pytest.mark.parametrize(
    "url", ["file:relative.wav", "file://other.host{folder}/a%20b.wav", "file:", "file://["]
)
async def test_other_forms_are_no_file_urls(url: str, folder: Path) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await read(folder, url.format(folder=folder))
    assert caught.value.code == "invalid_url"


async def test_file_above_the_limit_is_refused(folder: Path) -> None:
    (folder / "large.wav").write_bytes(bytes(101))
    with pytest.raises(InvalidRequestError) as caught:
        await read(folder, f"file://{folder}/large.wav")
    assert caught.value.code == "media_too_large"


async def test_folder_that_is_itself_a_link_is_the_one_it_leads_to(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert await read(link, f"file://{link}/a%20b.wav") == b"inside"


@pytest.mark.parametrize("name", ["none", "secret.txt"])
def test_what_is_no_folder_is_refused_at_the_start(name: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="folder of local media"):
        MediaSource((), LIMITS, folder.parent / name)
