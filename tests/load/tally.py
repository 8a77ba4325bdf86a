"""What came of the requests of a run."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    sent: int = 0
    exact: int = 0
    """Whole answers that are the same (`tests.load.answers`) as the one that the request got alone."""
    refused_as_expected: int = 0
    """Bad input that got the status it should."""
    aborted: int = 0
    """Left by their client before they were whole."""
    excused: Counter[str] = field(default_factory=Counter)
    """Errors, by code, that the server told while a stage was down."""
    wrong: list[str] = field(default_factory=list)
    """Descriptions of answers that are different, not well-formed, or errors without a reason."""
    lost: list[str] = field(default_factory=list)
    """Requests without an answer or an error: timed out, or cut off by the server."""
    duplicated: list[str] = field(default_factory=list)
    """Ids of answers that came twice."""
    ids: set[str] = field(default_factory=set)
    by_kind: Counter[str] = field(default_factory=Counter)
    """Exact ones."""
    aborted_by_kind: Counter[str] = field(default_factory=Counter)

    @property
    def is_clean(self) -> bool:
        return not (self.wrong or self.lost or self.duplicated)

    @property
    def accounted(self) -> int:
        told = self.exact + self.refused_as_expected + self.aborted + self.excused.total()
        return told + len(self.wrong) + len(self.lost)

    def took_id(self, answer_id: str) -> None:
        if answer_id in self.ids:
            self.duplicated.append(answer_id)
        self.ids.add(answer_id)
