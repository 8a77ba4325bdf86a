"""Finds tool calls in the model's text while it is written."""

import json
import re
import uuid

from omni_server.protocol.tool_calls import CALL_BEGIN, CALL_END
from omni_server.types import ToolCallDelta

_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_HEAD = re.compile(_NAME.pattern + r'\s*,\s*"arguments"\s*:\s*(?=\{)')

Piece = str | ToolCallDelta


class ToolParser:
    """Splits text into prose and calls, no matter how it is chunked.

    Prose is emitted as soon as it cannot be the beginning of a call, and arguments as they are written. White
    space before a call belongs to neither. Text after the arguments of a call is dropped, except for further
    calls. Text that looks like a call but names no function is prose. A text that was cut may end inside a
    call: the call has the arguments that were written, and before its name is complete, there is none.
    """

    def __init__(self, *, is_parallel: bool = True) -> None:
        """Without `is_parallel`, all calls but the first are dropped."""
        self._is_parallel = is_parallel
        self._step = self._in_prose  # continues from there; False if it needs more text
        self._buffer = ""  # text that is not classified yet
        self._space = ""  # white space before the last tag
        self._arguments = _JsonObject()
        self._has_tag = False
        self.num_calls = 0
        self.num_prose_chars = 0
        """Characters of prose before the first tag, which are also the first characters of the whole text."""

    def push(self, text: str) -> list[Piece]:
        """Adds text. Returns pieces of prose and of calls, in order."""
        self._buffer += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """Ends the text, which is complete unless it `is_cut`. Returns what was held back."""
        pieces: list[Piece] = []
        if self._step == self._in_head and not self._take_irregular(self._buffer, pieces):
            if not is_cut:
                self._take_nonsense(CALL_BEGIN + self._buffer, pieces)
            elif (name := _name_in(_NAME.match(self._buffer))) is not None:
                self._begin_call(name, pieces)
        elif self._step == self._in_prose:
            num_held = _overlap(self._buffer) if is_cut else 0
            self._prose(self._buffer[: len(self._buffer) - num_held], pieces)
        self._buffer = ""
        return pieces

    def _in_prose(self, pieces: list[Piece]) -> bool:
        before, tag, after = self._buffer.partition(CALL_BEGIN)
        if tag:
            prose = before.rstrip()
            self._prose(prose, pieces)
            self._space = before[len(prose) :]
            self._has_tag = True
            self._step, self._buffer = self._in_head, after
            return True
        held = len(self._buffer[: len(self._buffer) - _overlap(self._buffer)].rstrip())
        self._prose(self._buffer[:held], pieces)
        self._buffer = self._buffer[held:]
        return False

    def _in_head(self, pieces: list[Piece]) -> bool:
        """After the tag, before the arguments."""
        head = _HEAD.match(self._buffer)
        name = _name_in(head)
        if head is not None and name is not None:
            self._begin_call(name, pieces)
            self._arguments = _JsonObject()
            self._step, self._buffer = self._in_arguments, self._buffer[head.end() :]
            return True
        if self._buffer.lstrip()[:1] not in ("", "{"):
            self._take_nonsense(CALL_BEGIN, pieces)
            return True
        inside, tag, after = self._buffer.partition(CALL_END)
        if not tag:
            return False
        self._buffer = after
        if not self._take_irregular(inside, pieces):
            self._take_nonsense(CALL_BEGIN + inside + CALL_END, pieces)
        return True

    def _in_arguments(self, pieces: list[Piece]) -> bool:
        length = self._arguments.push(self._buffer)
        arguments, self._buffer = self._buffer[:length], self._buffer[length:]
        if arguments and self._is_wanted():
            pieces.append(ToolCallDelta(self.num_calls - 1, None, None, arguments))
        if not self._arguments.is_over:
            return False
        self._step = self._between
        return True

    def _between(self, pieces: list[Piece]) -> bool:
        """After the arguments of a call, only another call matters."""
        _, tag, after = self._buffer.partition(CALL_BEGIN)
        if not tag:
            self._buffer = self._buffer[len(self._buffer) - _overlap(self._buffer) :]
            return False
        self._step, self._buffer = self._in_head, after
        return True

    def _take_irregular(self, inside: str, pieces: list[Piece]) -> bool:
        """Handles a call with its keys in another order, for example. Returns whether it is a call."""
        call = _parsed(inside)
        if not (
            isinstance(call, dict)
            and isinstance(call.get("name"), str)
            and isinstance(call.get("arguments"), dict)
        ):
            return False
        self._begin_call(call["name"], pieces)
        if self._is_wanted():
            arguments = json.dumps(call["arguments"], ensure_ascii=False)
            pieces.append(ToolCallDelta(self.num_calls - 1, None, None, arguments))
        self._step = self._between
        return True

    def _take_nonsense(self, text: str, pieces: list[Piece]) -> None:
        """Handles text that is not a call, in spite of its tag."""
        if self.num_calls == 0:
            self._step = self._in_prose
            self._prose(self._space + text, pieces)
        else:
            self._step = self._between

    def _begin_call(self, name: str, pieces: list[Piece]) -> None:
        self.num_calls += 1
        if self._is_wanted():
            pieces.append(ToolCallDelta(self.num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", name, ""))

    def _is_wanted(self) -> bool:
        return self._is_parallel or self.num_calls == 1

    def _prose(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        pieces.append(text)
        if not self._has_tag:
            self.num_prose_chars += len(text)


class _JsonObject:
    """Finds where a JSON object ends in text that begins with it. Inspects the contents no more than
    necessary."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self.is_over = False

    def push(self, text: str) -> int:
        """Returns the number of characters that belong to the object."""
        for position, character in enumerate(text):
            if self._is_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._is_string = False
            elif character == '"':
                self._is_string = True
            elif character == "<":  # not JSON: a tag arrived too early
                self.is_over = True
                return position
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_over = True
                    return position + 1
        return len(text)


def _overlap(text: str) -> int:
    """Returns the length of the longest suffix of `text` that could begin a tag."""
    return next(
        n for n in range(min(len(text), len(CALL_BEGIN) - 1), -1, -1) if text.endswith(CALL_BEGIN[:n])
    )


def _name_in(head: re.Match[str] | None) -> str | None:
    """Returns the name of the function."""
    name = None if head is None else _parsed(head[1])
    return name if isinstance(name, str) else None


def _parsed(text: str) -> object:
    """Returns None if `text` is not JSON, is nested too deeply or has an escape that is not a character."""
    try:
        value: object = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value
