"""How a test tells a stage to fail: a file of its name in a folder that the environment names."""

from pathlib import Path

FOLDER_VARIABLE = "OMNI_SERVER_TEST_ORDERS"


def tell_to_fail(folder: Path, stage: str) -> None:
    """The stage's model raises in its next step, and only there."""
    (folder / stage).touch()


def withdraw(folder: Path) -> None:
    for order in folder.iterdir():
        order.unlink()
