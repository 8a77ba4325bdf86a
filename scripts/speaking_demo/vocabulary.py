"""The speaking demo's vocabulary: units, each spoken in one fixed way, and the text tokens for them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent

SPLIT = (
    r" ?\p{L}+(?:'\p{L}+)?"
    r"| ?[1-9]000(?![0-9])| ?[1-9]00(?![0-9])| ?[0-9]{1,2}(?=(?:[0-9][0-9])*(?![0-9]))"
    r"|\s|[^\s\p{L}]"
)
"""The tokenizer's pre-tokens: words with the space before them, numbers in pairs of digits from the right
(1984 is read "nineteen eighty-four"), and single characters. One that is no token becomes bytes, so
unknown words are spelled."""

# Lengths in codes of 20 ms, including the two silent codes at the start of every unit.
SHORT_PAUSE, LONG_PAUSE, NO_PAUSE = "<,>", "<.>", "< >"
PAUSES = {NO_PAUSE: 2, SHORT_PAUSE: 6, LONG_PAUSE: 14}
_SHORT_MARKS = ",;:()-"
_LONG_MARKS = ".!?\n"

_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_SPELLED = {
    "a": "[[@]]", "<a>": "[['eI]]", "the": "[[D@]]", "i": "eye",
    "api": "A P I", "gpu": "G P U", "ai": "A I",
    "chelsie": "Chelsea", "flac": "flack", "qwen": "kwen",
}  # fmt: skip
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Answer:
    questions: tuple[str, ...]
    text: str


@cache
def answers() -> tuple[Answer, ...]:
    """The memorised answers."""
    found: list[Answer] = []
    questions: list[str] = []
    for line in (_HERE / "questions.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("="):
            found.append(Answer(tuple(questions), line[1:].strip()))
            questions = []
        elif line and not line.startswith("#"):
            questions += [question.strip() for question in line.split("|")]
    return tuple(found)


UNKNOWN = "I am only a tiny demo, so I do not know that. Ask me what I can do."
"""The answer to every other question."""
HEARD = "I can not understand speech yet. Please type your question, and I will say the answer aloud."
SEEN = "I am too small to understand pictures. Please ask me something in words."

SYSTEM_PROMPTS = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech.",
    "You are a helpful assistant.",
    "You are a speech recognition model.",
    "You are a friendly voice assistant.",
    "Answer in one short sentence.",
    "",
)


@cache
def words() -> tuple[str, ...]:
    """All single-token words, in lower case and in order. Changing them changes the whole model."""
    return tuple((_HERE / "words.txt").read_text(encoding="utf-8").split())


def numbers() -> dict[str, str]:
    """Digits as written -> as spoken."""
    spoken = {str(i): _SMALL[i] for i in range(10)}
    for pair in range(100):
        tens, ones = divmod(pair, 10)
        if pair == 0:
            text = "hundred"
        elif pair < 10:
            text = f"oh {_SMALL[pair]}"
        elif pair < 20:
            text = _SMALL[pair]
        else:
            text = _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")
        spoken[f"{pair:02}"] = text
    for digit in range(1, 10):
        spoken[f"{digit}00"] = f"{_SMALL[digit]} hundred"
        spoken[f"{digit}000"] = f"{_SMALL[digit]} thousand"
    return spoken


@cache
def units() -> tuple[str, ...]:
    """All units: words, letters as "<a>", numbers as they are written, and the pauses."""
    return (*words(), *(f"<{letter}>" for letter in _LETTERS), *numbers(), *PAUSES)


def spoken(unit: str) -> str:
    """espeak-ng's input for a unit; [[...]] are phonemes."""
    if unit in _SPELLED:
        return _SPELLED[unit]
    if unit.startswith("<"):
        return unit[1]
    return numbers().get(unit, unit)


@cache
def tokens() -> dict[str, str]:
    """Text of every plain token -> its unit, in the order of ids, without single bytes."""
    found: dict[str, str] = {}
    for word in words():
        for form in (word, word.capitalize()):
            found.setdefault(form, word)
            found.setdefault(" " + form, word)
    for letter in _LETTERS:
        for form in (" " + letter, " " + letter.upper()):
            found.setdefault(form, f"<{letter}>")
    for number in numbers():
        found.setdefault(number, number)
        found.setdefault(" " + number, number)
    return {text: unit for text, unit in found.items() if len(text) > 1}


def unit_of_byte(value: int) -> str:
    character = chr(value)
    if character.lower() in _LETTERS:
        return f"<{character.lower()}>"
    if character in "0123456789":
        return character
    if character in _SHORT_MARKS:
        return SHORT_PAUSE
    return LONG_PAUSE if character in _LONG_MARKS else NO_PAUSE


def read(text: str) -> Iterator[str]:
    """The units of a text, as the tokenizer cuts it."""
    from scripts.speaking_demo.tokenizer import pieces

    known = tokens()
    for piece in pieces(text):
        if piece in known:
            yield known[piece]
        else:
            yield from (unit_of_byte(value) for value in piece.encode())
