"""`rows.md`, the table of the checklist's rows and the tests that show them, is complete and true."""

import re
from pathlib import Path

from tests.unit.api.test_bad_requests import REFUSED

FOLDER = Path(__file__).parent
TESTS = FOLDER.parents[1]
SECTIONS = {"C": 61, "S": 20, "T": 17, "R": 26, "M": 9, "E": 14, "O": 10}
NOT_ON_THE_DEMO_SERVER = {"O07"}
"""Rows with a reason instead of a test."""

_LINES = [
    line.strip("| ").split("|") for line in (FOLDER / "rows.md").read_text().splitlines() if "|" in line
]
_CELLS = [[cell.strip() for cell in line] for line in _LINES]
FILES = {cells[0]: cells[1] for cells in _CELLS if cells[1].endswith(".py")}
ROWS = [cells for cells in _CELLS if re.fullmatch(r"[A-Z]\d\d", cells[0])]


def shown_by(cell: str) -> list[tuple[str, str]]:
    """File and name of each test of a cell; no file for a case of `REFUSED`."""
    tests = [reference.partition("::") for reference in cell.split(", ") if reference]
    return [(FILES[file], name) if name else ("", file) for file, _, name in tests]


def test_every_row_is_here_once_and_in_order() -> None:
    rows = [f"{section}{number:02}" for section, last in SECTIONS.items() for number in range(1, last + 1)]
    assert [cells[0] for cells in ROWS] == rows
    assert len(rows) == 157


def test_every_row_is_shown_by_tests_that_exist() -> None:
    cases = {f"refused[{case[0]}]" for case in REFUSED}
    for row, what, demo, *scripted in ROWS:
        assert what
        if row in NOT_ON_THE_DEMO_SERVER:
            assert demo.startswith("no: ")
            continue
        assert demo or any(scripted), row
        on_demo, others = shown_by(demo), shown_by("".join(scripted))
        for file, name in on_demo + others:
            assert name in cases if not file else f"def {name}(" in (TESTS / file).read_text(), name
        assert all(file.startswith(("integration/", "faults/")) for file, _ in on_demo if file)
        assert all(file.startswith("unit/") for file, _ in others)


def test_every_test_of_this_folder_is_in_the_table() -> None:
    listed = {test for cells in ROWS if cells[0] not in NOT_ON_THE_DEMO_SERVER for test in shown_by(cells[2])}
    for path in FOLDER.glob("test_*.py"):
        if path.name != Path(__file__).name:
            names = re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
            assert {(path.relative_to(TESTS).as_posix(), name) for name in names} <= listed
