"""A long text, cut into passages that fit into one utterance.

The model ends an utterance at its limit of codec tokens, and was trained on replies of at most a minute or
two.
"""

import re
import unicodedata

_MAX_COST = 600
"""About 40 s of speech."""
_COST_PER_SECOND = 15
"""Latin letters that take a second to speak."""
_SHARE_OF_LIMIT = 0.5
"""Of the model's limit that a passage may be expected to take: some voices are slower, some words are
spelled."""
_WIDE_COST = 3
"""Chinese, Japanese and Korean characters are syllables."""
_DIGIT_COST = 5
"""Each is a word."""

# From the best place to cut at to the worst; the cut comes behind the match.
_CUTS = (
    re.compile(r"\n\s*\n"),
    re.compile(r"[.!?…][\"'”’»)\]]*\s+|[。！？][」』”’）]*"),
    re.compile(r"[,;:–—]\s+|[，；：、]|\n"),
    re.compile(r"\s+"),
)
_ZERO_WIDTH_JOINER = "\u200d"


def passages(text: str, longest_speech_s: float, longest_passage: int | None = None) -> list[str]:
    """`text` cut where speech pauses, if it can be, and always where it gets too long; no passage is blank.

    Nothing but white space at the cuts and at both ends is lost. `longest_speech_s`: what the model speaks in
    one utterance at most. `longest_passage`: the same as the checkpoint states it, in Latin letters.
    """
    found: list[str] = []
    rest = text.strip()
    max_cost = min(
        longest_passage or _MAX_COST, _MAX_COST, _SHARE_OF_LIMIT * longest_speech_s * _COST_PER_SECOND
    )
    while (limit := _fitting(rest, max_cost)) < len(rest):
        cut = _cut(rest, limit)
        found.append(rest[:cut].strip())
        rest = rest[cut:].strip()
    return [*found, rest] if rest else found


def _fitting(text: str, max_cost: float) -> int:
    """How many leading characters fit into a passage."""
    cost = 0
    for index, character in enumerate(text):
        if character.isdigit():
            cost += _DIGIT_COST
        else:
            cost += _WIDE_COST if unicodedata.east_asian_width(character) in "WF" else 1
        if cost > max_cost:
            return max(1, index)
    return len(text)


def _cut(text: str, limit: int) -> int:
    """Where to end the passage: in the second half of what fits, so that passages do not become
    many and short."""
    for pattern in _CUTS:
        ends = [match.end() for match in pattern.finditer(text, 0, limit) if match.end() > limit // 2]
        if ends:
            return ends[-1]
    for cut in range(limit, limit // 2, -1):
        if not _belong_together(text[cut - 1], text[cut]):
            return cut
    return limit


def _belong_together(before: str, after: str) -> bool:
    """Whether both are part of one character as it is seen."""
    return _ZERO_WIDTH_JOINER in (before, after) or unicodedata.category(after) in ("Mn", "Mc", "Me", "Sk")
