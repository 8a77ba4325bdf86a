"""Prose and calls in text that comes in any pieces."""

import random
from collections.abc import Callable

import pytest

from omni_server.orchestrator.tool_parser import ToolParser
from omni_server.types import ToolCallDelta

CALL = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "a } \\" <b> é", "n": [1, {"x": {}}]}}\n</tool_call>'
)
ARGUMENTS = '{"at": "a } \\" <b> é", "n": [1, {"x": {}}]}'
OTHER = '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>'


def parsed(*texts: str, is_parallel: bool = True, is_cut: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Prose, and name and arguments of each call; checks that each call's id and name come once, and
    first."""
    parser = ToolParser(is_parallel=is_parallel)
    pieces = [piece for text in texts for piece in parser.push(text)] + parser.finish(is_cut=is_cut)
    calls: list[tuple[str, str]] = []
    ids = set()
    for piece in pieces:
        if not isinstance(piece, ToolCallDelta):
            continue
        if piece.name is not None:
            assert piece.call_id is not None
            assert (piece.index, piece.arguments) == (len(calls), "")
            ids.add(piece.call_id)
            calls.append((piece.name, ""))
        else:
            assert piece.call_id is None
            assert piece.index == len(calls) - 1
            name, arguments = calls[-1]
            calls[-1] = name, arguments + piece.arguments
    assert len(ids) == len(calls)
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls


NO_TEXT = '<tool_call>{"name": "a\\ud800", "arguments": {}}</tool_call>'
NO_TEXT_INSIDE = '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "go"}</tool_call>'

CASES = [
    ("a name that has no encoding", NO_TEXT, NO_TEXT, []),
    ("arguments that have no encoding", NO_TEXT_INSIDE, NO_TEXT_INSIDE, []),
    ("nothing", "", "", []),
    ("prose", "Hello <b>you</b>, 1 < 2\n", "Hello <b>you</b>, 1 < 2\n", []),
    ("a call", CALL, "", [("look", ARGUMENTS)]),
    ("prose before a call", "Let me see.\n\n" + CALL + "\n", "Let me see.", [("look", ARGUMENTS)]),
    ("two calls", CALL + "\n" + OTHER, "", [("look", ARGUMENTS), ("go", "{}")]),
    ("text between and behind calls", CALL + " and " + OTHER + " so", "", [("look", ARGUMENTS), ("go", "{}")]),
    ("a beginning of a tag at the end", "one <tool_ca", "one <tool_ca", []),
    ("no white space", '<tool_call>{"name":"go","arguments":{"a":1}}</tool_call>', "", [("go", '{"a":1}')]),
    ("a name with an escape", '<tool_call>{"name": "a\\u0062", "arguments": {}}</tool_call>', "", [("ab", "{}")]),
    (
        "keys in another order",
        '<tool_call>\n{"arguments": {"a": "é"}, "name": "go"}\n</tool_call>' + OTHER,
        "",
        [("go", '{"a": "é"}'), ("go", "{}")],
    ),
    ("an end inside arguments", CALL[:60], "", [("look", '{"at": "a } \\" <b>')]),
    ("a tag in prose before a call", "<tool_call> begins " + OTHER, "<tool_call> begins", [("go", "{}")]),
    ("an end inside the head", '<tool_call>\n{"name": "lo', '<tool_call>\n{"name": "lo', []),
    ("no closing tag", '<tool_call>\n{"arguments": {}, "name": "go"}', "", [("go", "{}")]),
    (
        "missing closing tag between calls",
        CALL.removesuffix("</tool_call>") + OTHER,
        "",
        [("look", ARGUMENTS), ("go", "{}")],
    ),
    (
        "arguments that end too early",
        '<tool_call>\n{"name": "go", "arguments": {"a": \n</tool_call>',
        "",
        [("go", '{"a": \n')],
    ),
    ("no JSON", "a <tool_call>nonsense</tool_call> b", "a <tool_call>nonsense</tool_call> b", []),
    ("no name", '<tool_call>{"x": 1}</tool_call>' + OTHER, '<tool_call>{"x": 1}</tool_call>', [("go", "{}")]),
    ("arguments that are no object", '<tool_call>{"name": "go", "arguments": 5}</tool_call>',
     '<tool_call>{"name": "go", "arguments": 5}</tool_call>', []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "prose", "calls"), CASES, ids=[case[0] for case in CASES])
def test_text_in_any_pieces_is_split_into_prose_and_calls(
    name: str, text: str, prose: str, calls: list[tuple[str, str]]
) -> None:
    assert parsed(text) == (prose, calls)
    assert parsed(*text) == (prose, calls)
    rng = random.Random(0)
    for _ in range(50):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(4))
        assert parsed(*(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))) == (
            prose,
            calls,
        )


@pytest.mark.parametrize("pieces", [lambda text: [text], list], ids=["whole", "by character"])
def test_a_call_that_is_cut_anywhere_leaves_no_markup(pieces: Callable[[str], list[str]]) -> None:
    text = "Let me see.\n" + CALL + "\n" + OTHER
    name, second = text.index('"look"') + len('"look"'), text.index('"go"') + len('"go"')
    for end in range(len(text)):
        prose, calls = parsed(*pieces(text[:end]), is_cut=True)
        assert prose.rstrip("\n") == text[:end].partition("\n")[0]
        assert [called for called, _ in calls] == ["look", "go"][: (end >= name) + (end >= second)]
        if calls:
            assert ARGUMENTS.startswith(calls[0][1])


def test_text_that_is_cut_and_is_no_call_is_prose() -> None:
    for text in ("1 < 2 ", "a <tool_call> is a tag", "a <tool_call>nonsense</tool_call>"):
        assert parsed(text, is_cut=True) == (text, [])


def test_nesting_without_end_is_no_call() -> None:
    text = "<tool_call>" + "[" * 100_000 + "</tool_call>"
    assert parsed(text) == (text, [])


def test_only_the_first_call_is_kept_where_calls_are_not_parallel() -> None:
    assert parsed(CALL + OTHER, is_parallel=False) == ("", [("look", ARGUMENTS)])


def test_prose_leaves_as_soon_as_it_cannot_be_a_tag() -> None:
    parser = ToolParser()
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" \n") == []
    assert parser.push("<tool_c") == []
    assert parser.push("ar") == [" \n<tool_car"]
    assert parser.num_prose_chars == len("Hello \n<tool_car")


def test_arguments_leave_as_they_are_written() -> None:
    parser = ToolParser()
    parser.push('<tool_call>\n{"name": "go", "arguments": ')
    begun = parser.push("{")
    assert [type(piece) for piece in begun] == [ToolCallDelta, ToolCallDelta]
    assert parser.push('"a": ') == [ToolCallDelta(0, None, None, '"a": ')]
    assert parser.num_calls == 1


@pytest.mark.parametrize("text", [CALL, "Hi " + CALL, "Hi <tool_call>nonsense</tool_call> there"])
def test_nothing_from_a_tag_on_may_be_spoken(text: str) -> None:
    parser = ToolParser()
    for character in text:
        parser.push(character)
    parser.finish(is_cut=False)
    assert parser.num_prose_chars == len(text.partition("<tool_call>")[0].rstrip())
