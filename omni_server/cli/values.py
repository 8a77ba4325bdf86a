"""Values of command-line flags, as `type` of `argparse` takes them. Each raises `argparse.ArgumentTypeError`."""

import argparse
import json
import re

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is no port: 0 to 65535")
    return int(text)


def seconds(text: str) -> float:
    value = seconds_or_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return value


def seconds_or_zero(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of seconds")
    return float(text)


def size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)(?:i?b)?", text.lower())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no size: a number of bytes, or as in 512K, 64M, 1G")
    return int(match[1]) * _UNITS[match[2]]


def count(text: str) -> int:
    """A whole number that is not negative."""
    if not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number of 0 or more")
    return int(text)


def positive_count(text: str) -> int:
    value = count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def words(texts: list[str]) -> tuple[str, ...]:
    """The words of a flag with `nargs="+"`; vLLM's users give them as one JSON list."""
    if len(texts) == 1 and texts[0].startswith("["):
        try:
            parsed = json.loads(texts[0])
        except ValueError:
            parsed = None
        if not isinstance(parsed, list) or not all(isinstance(item, str) for item in parsed):
            raise argparse.ArgumentTypeError(f"'{texts[0]}' is no JSON list of strings")
        return tuple(parsed)
    return tuple(texts)
