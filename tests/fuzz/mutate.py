"""Changes at random: of bytes, of text and of JSON's values."""

import json
import random
from typing import Any

WORDS = (
    "", " ", "a", "\0", "null", "NaN", "-1", "1e999", "\u2028", "\ufeff", "\u202e", "🤖", "é" * 3, "x" * 5_000, "%00",
    "../..", "{{7*7}}", "${x}", "' OR 1=1", "<script>", "<|im_start|>", "<|im_end|>", "a" * 70_000, "\r\n\r\n",
    "data:,", "http://[", "file:///etc/passwd", "http://127.0.0.1/", "data:audio/wav;base64,", "true", "omni", "inf",
)  # fmt: skip
NUMBERS = (
    0, -0.0, 1, -1, 0.5, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**300, 1e308, -1e308, 5e-324,
    128,
)  # fmt: skip
REGEXES = (
    "(",
    "a{1,99999999}",
    "(a+)+$",
    "[",
    "\\",
    "(?=a)",
    "\\p{L}",
    "(" * 2_000,
    "a|" * 5_000,
    "[^\0-\U0010ffff]",
)
SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"type": "string", "pattern": "(a+)+$"},
    {"anyOf": [{"type": "string"}] * 500},
    {"enum": [[]] * 200},
    {"type": "array", "minItems": 2**40},
    {"properties": []},
    {"type": {}},
    {"allOf": 5, "enum": "x", "const": None},
)
RAW = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999999", b'"\\ud800"', b'"\xff"', b'"\\u0000"', b"1" * 5_000, b"[" * 300,
    b"{}{}", b"\xef\xbb\xbf", b"/**/", b"'a'", b'"a":1,"a":2', b"0x10", b"01", b"+1", b".5", b"tru", b"\0",
    b"\x80" * 20, b"]", b",", b'"',
)  # fmt: skip
"""Put among the bytes of JSON."""


def deep(rng: random.Random) -> Any:
    value: Any = 1
    for _ in range(rng.choice((10, 150, 190))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def value(rng: random.Random) -> Any:
    """Any JSON value."""
    match rng.randrange(11):
        case 0:
            return rng.choice(WORDS)
        case 1:
            return rng.choice(NUMBERS)
        case 2:
            return rng.choice((None, True, False))
        case 3:
            return json.loads(
                rng.choice(("[]", "{}", "[[]]", "[{}]", '{"": ""}', '{"type": ""}', '{"id": "Ethan"}'))
            )
        case 4:
            return deep(rng)
        case 5:
            return [rng.choice((0, "", None, {}))] * rng.choice((1, 3, 3_000))
        case 6:
            return {str(number): rng.choice((0, "", None)) for number in range(rng.choice((1, 20, 3_000)))}
        case 7:
            return rng.choice(REGEXES)
        case 8:
            return json.loads(json.dumps(rng.choice(SCHEMAS)))
        case 9:
            return [value(rng) for _ in range(rng.randrange(4))]
        case _:
            return {rng.choice(WORDS[:20]): value(rng) for _ in range(rng.randrange(4))}


def changed_json(rng: random.Random, given: Any) -> Any:
    """One to three changes anywhere in a copy of `given`."""
    root = [json.loads(json.dumps(given))]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder, key = rng.choice(_places(root))
        match rng.randrange(8):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(WORDS)] = holder.pop(key)
            case 2 if isinstance(holder, dict):
                holder[rng.choice(WORDS)] = value(rng)
            case 3:
                holder[key] = [holder[key]] * rng.choice((1, 2, 40))
            case 4 if isinstance(holder[key], str):
                holder[key] = changed_text(rng, holder[key])
            case 5:
                other, other_key = rng.choice(_places(root))
                holder[key] = json.loads(json.dumps(other[other_key]))
            case _:
                holder[key] = value(rng)
    return root[0]


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """Every value, as the list or object that holds it and its key there."""
    found: list[tuple[Any, Any]] = []
    waiting: list[Any] = [root]
    while waiting and len(found) < 2_000:
        here = waiting.pop()
        for key, held in here.items() if isinstance(here, dict) else enumerate(here):
            found.append((here, key))
            if isinstance(held, dict | list):
                waiting.append(held)
    return found


def changed_text(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice((*WORDS, *REGEXES)) + text[at + rng.choice((0, 1, 10)) :]


def changed_bytes(rng: random.Random, data: bytes, inserts: tuple[bytes, ...] = RAW) -> bytes:
    """One to four changes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(7):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                changed[at:at] = rng.choice(inserts)
            case 2:
                changed[at : at + rng.choice((1, 5, 20))] = rng.choice(inserts)
            case 3:
                del changed[at : at + rng.choice((1, 4, 50))]
            case 4:
                changed[at:at] = changed[at : at + rng.choice((1, 10, 100))] * rng.choice((1, 2, 50))
            case 5:
                del changed[at:]
            case 6:
                changed[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
    return bytes(changed)
