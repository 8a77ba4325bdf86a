"""Helpers shared by the commands: a parser with short error messages, argparse types, conversion of flags to
dataclasses, and the command that starts this program."""

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

PROGRAM = "omni-server"

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def program() -> str:
    """The command that starts this program, quoted for a shell: its bare name if PATH leads to this very
    program, which is not the case in a checkout whose environment is not active."""
    started = Path(sys.argv[0])
    if started.name != PROGRAM:
        return shlex.join([sys.executable, "-m", "omni_server.cli.entry"])
    on_path = shutil.which(PROGRAM)
    if on_path is not None and started.exists() and started.samefile(on_path):
        return PROGRAM
    return shlex.quote(str(started))


class Parser(argparse.ArgumentParser):
    """Prints errors in two lines, without the usage, whose dozens of flags would hide the reason.

    Sets `parser` in the parsed namespace to itself, or to the innermost sub-parser that was used.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - argparse's options
        super().__init__(**options)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        name, *commands = self.prog.split()
        command = " ".join([program(), *commands]) if name == PROGRAM else self.prog
        self.exit(2, f"{self.prog}: error: {message}\nHelp: {command} --help\n")

    def unrecognized(self, arguments: Sequence[str]) -> str:
        """Returns an error message for unknown `arguments` that suggests similar flags."""
        flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("-")]
        meant = [
            match for flag in flags for match in get_close_matches(flag, self._option_string_actions, n=1)
        ]
        hint = f"; did you mean {' and '.join(meant)}?" if meant else ""
        return f"unrecognized arguments: {' '.join(arguments)}{hint}"


def options_of(kind: type[Options], parsed: argparse.Namespace, **others: object) -> Options:
    """Builds a `kind` from the flags named like its fields and from `others`, which take precedence."""
    values = vars(parsed) | others
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})


# Types for argparse; each raises `ArgumentTypeError`.


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port: 0 to 65535")
    return int(text)


def seconds(text: str) -> float:
    value = seconds_or_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return value


def seconds_or_zero(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")
    return float(text)


def size(text: str) -> int:
    """Bytes."""
    match = re.fullmatch(r"(\d+)([kmg]?)(?:i?b)?", text.lower())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size: a number of bytes, or as in 512K, 64M, 1G")
    return int(match[1]) * _UNITS[match[2]]


def count(text: str) -> int:
    """Parses a non-negative integer."""
    if not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 0 or more")
    return int(text)


def positive_count(text: str) -> int:
    value = count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value
