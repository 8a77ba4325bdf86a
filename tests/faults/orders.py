"""How a test tells a stage to fail: a file of its name in a folder that the environment names."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.server_process import wait_until

FOLDER_VARIABLE = "OMNI_SERVER_TEST_ORDERS"


def tell_to_fail(folder: Path, stage: str) -> None:
    """The stage's model raises in its next step, and only there."""
    (folder / stage).touch()


def tell_to_refuse(folder: Path, phase: str, error: type[Exception] = RuntimeError) -> None:
    """The next request in this phase of an image gets an error of its own: `RuntimeError` or `ValueError`."""
    (folder / f"{phase}.refuse").write_text(error.__name__)


def tell_to_count(folder: Path, phase: str) -> None:
    """The engine counts from 0 how often this phase of an image begins."""
    (folder / f"{phase}.count").write_bytes(b"")


def num_counted(folder: Path, phase: str) -> int:
    return (folder / f"{phase}.count").stat().st_size


def tell_to_hold(folder: Path, stage: str) -> None:
    """The stage's model stays in its next step."""
    (folder / f"{stage}.hold").touch()


def wait_until_held(folder: Path, stage: str) -> None:
    """It has come there."""
    wait_until((folder / f"{stage}.held").exists, 60)


def let_go(folder: Path, stage: str) -> None:
    """It would go on."""
    (folder / f"{stage}.held").unlink()


def tell_to_forget(folder: Path, stage: str) -> Path:
    """The stage's model loses the states of all streams before each step, until the order is withdrawn.
    Returns the file to which it adds a byte each time."""
    order = folder / f"{stage}.forget"
    order.touch()
    return order


@contextmanager
def starts_held() -> Iterator[None]:
    """Engines that start in the block wait for its end: a stage that goes down stays down until then."""
    _starts_hold().touch()
    try:
        yield
    finally:
        _starts_hold().unlink()


def wait_while_starts_are_held() -> None:
    """In an engine's process."""
    while _starts_hold().exists():
        time.sleep(0.01)


def _starts_hold() -> Path:
    return Path(os.environ[FOLDER_VARIABLE]) / "starts.hold"


def withdraw(folder: Path) -> None:
    for order in folder.iterdir():
        order.unlink()
