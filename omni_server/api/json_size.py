"""How many values a caller's JSON may have, told before it is parsed."""

MAX_JSON_MARKS = 1 << 18
"""Commas and opening brackets. Each value that is parsed takes up to a hundred bytes of memory for its three in the
body, and each that is found wrong more than a thousand. Text has such marks, too; a chat as long as a model's context
has a tenth of this number."""

_MARKS = ",[{"


def has_too_many_values(text: bytes | str) -> bool:
    """Each value but the outermost stands behind one of these marks."""
    if isinstance(text, bytes):
        return sum(text.count(mark.encode()) for mark in _MARKS) > MAX_JSON_MARKS
    return sum(text.count(mark) for mark in _MARKS) > MAX_JSON_MARKS
