"""What a language model writes, and what of it is spoken. `WRITTEN_AND_SPOKEN` documents the filter."""

import random

import pytest

from stages.spoken_llm.spoken_text_filter import SpokenTextFilter

WRITTEN_AND_SPOKEN = [
    # Text without markup is spoken as it is written.
    ("Hello, world! How are you?", "Hello, world! How are you?"),
    ("2 * 3 = 6, 3*4*5 = 60 and 5 - 3 = 2", "2 * 3 = 6, 3*4*5 = 60 and 5 - 3 = 2"),
    ("x**2 + y**2, f(*args, **kwargs)", "x**2 + y**2, f(*args, **kwargs)"),
    ("snake_case, a_b, _private, Name: ____", "snake_case, a_b, _private, Name: ____"),
    ("5 < 6, a<b, a<b and c>d, I <3 you, x -> y", "5 < 6, a<b, a<b and c>d, I <3 you, x -> y"),
    ("C#, #1, #hashtag, ~5, ~/a, -5, +1", "C#, #1, #hashtag, ~5, ~/a, -5, +1"),
    ("$5, 3 €, 10 %, R&D, 5* hotels, 4* hotels", "$5, 3 €, 10 %, R&D, 5* hotels, 4* hotels"),
    ("$x_1 * x_2 = \\frac{a}{b}$, \\[ y \\]", "$x_1 * x_2 = \\frac{a}{b}$, \\[ y \\]"),
    ("Use List<String> and <name>.", "Use List<String> and <name>."),
    ("Hello 👋🏽, 👨‍👩‍👧! ¯\\(ツ)/¯ -_-", "Hello 👋🏽, 👨‍👩‍👧! ¯\\(ツ)/¯ -_-"),
    ("你好，世界！ こんにちは。 안녕하세요", "你好，世界！ こんにちは。 안녕하세요"),
    ("مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก", "مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก"),
    ("what, however, http, https: and www.", "what, however, http, https: and www."),
    ("mail a@b.org, see [1] and a[0](x", "mail a@b.org, see [1] and a[0](x"),
    ("  indented \n\tlines  \r\nand breaks\r\n", "  indented \n\tlines  \r\nand breaks\r\n"),
    ("", ""),
    # Paragraphs are pauses. Several blank lines become one; those before the first word are left out.
    ("One.\n\nTwo.\nThree.", "One.\n\nTwo.\nThree."),
    ("One.\n\n\n\n\nTwo.", "One.\n\nTwo."),
    ("\n\nOne.\n", "One.\n"),
    # Emphasis: the marks are left out.
    ("*one* **two** ***three***", "one two three"),
    ("_one_ __two__ ___three___ ~~four~~", "one two three four"),
    ("(**one**), “*two*”—_three_.", "(one), “two”—three."),
    ("**one *two* three**, **one *two***, ***one** two*", "one two three, one two, one two"),
    ("**snake_case and 2 * 3**", "snake_case and 2 * 3"),
    ("**A* search**", "A* search"),
    ("**API**s", "APIs"),
    ("这是**重点**内容，**重点：**内容", "这是重点内容，重点：内容"),
    ("これは**重要**です。그는 **강조**를 นี่คือ**สำคัญ**มาก", "これは重要です。그는 강조를 นี่คือสำคัญมาก"),
    ("Это **важно**!", "Это важно!"),
    # What is not closed in the same line is text.
    ("*one", "*one"),
    ("**one and _two", "**one and _two"),
    ("*one\ntwo*", "*one\ntwo*"),
    ("Price* and (*) and **", "Price* and (*) and **"),
    ("[one", "[one"),
    ("[one](two", "[one](two"),
    ("`one", "`one"),
    # A backslash in front of a mark makes it text.
    ("\\*one\\* \\_two\\_ \\# \\$5 \\`x\\`", "*one* _two_ # $5 `x`"),
    ("C:\\Users and \\(x\\)", "C:\\Users and \\(x\\)"),
    # Inline code: its marks are left out, and what looks like markup in it is text.
    ("Call `get_user()` or `a * b * c`.", "Call get_user() or a * b * c."),
    ("``a ` b`` and ```c```", "a ` b and c"),
    ("**`one`** and `<think>`", "one and <think>"),
    # Code blocks are left out. If one is not closed, so is the rest.
    ("Run:\n```python\nprint(1)\n```\nDone.", "Run:\n\nDone."),
    ("Run:\n\n```\na\n\n# b\n```\n\nDone.", "Run:\n\nDone."),
    ("Run:\n~~~ sh\na\n```\nb\n~~~\nDone.", "Run:\n\nDone."),
    ("````md\n```py\na\n```\n````\nDone.", "Done."),
    ("1. Run:\n   ```\n   a\n   ```\n2. Done.", "1. Run:\n\n2. Done."),
    ("> Run:\n> ```\n> a\n> ```\n> Done.", "Run:\n\nDone."),
    ("Run: ```py\na\n```\nDone.", "Run: \nDone."),
    ("Run:\r\n```\r\na\r\n```\r\nDone.", "Run:\r\n\nDone."),
    ("Run:\n```\na\nb", "Run:\n"),
    # Tables are left out. A line of bars without the line of dashes below it is text.
    ("See:\n\n| a | b |\n|---|:-:|\n| 1 | 2 |\n| 3 | 4 |\n\nDone.", "See:\n\nDone."),
    ("See:\n| a | b\n| --- | ---\n| 1 | 2\nDone.", "See:\n\nDone."),
    ("| a |\n|---|", ""),
    ("|x| is 5.\n|y| is 6.", "|x| is 5.\n|y| is 6."),
    ("a | b\n--- | ---", "a | b\n--- | ---"),
    # Links and images: their text is spoken. Addresses are left out.
    ("See [the page](https://a.org/b_(c) \"title\").", "See the page."),
    ("**[one](a)** [**two**](b) [`x_y`](c) [[1]](d)", "one two x_y [1]"),
    ("![A cat](cat.png) and ![](dog.png)[![badge](a)](b)", "A cat and badge"),
    ("See https://a.org/b_c?d=1#e for more.", "See for more."),
    ("See https://en.wikipedia.org/wiki/K%C3%A5re, www.KÅ.org.", "See , ."),
    ("One[^1].", "One."),
    ("See (www.a.org/b_(c)), https://a.org.", "See (), ."),
    ("See <https://a.org> and **http://b.org**!", "See  and !"),
    ("请看https://a.org/b。谢谢", "请看。谢谢"),
    # Headings, lists, quotes and rules: numbers of lists stay.
    ("# One\n\n## Two #1\n### **Three**\n", "One\n\nTwo #1\nThree\n"),
    ("One\n===\nTwo\n---\nThree", "One\n\nTwo\n\nThree"),
    ("- one\n* two\n+ three\n  - *four*", "one\ntwo\nthree\nfour"),
    ("- [ ] one\n- [x] two\n- [three](a)", "one\ntwo\nthree"),
    ("1. one\n2. **two**\n10) three", "1. one\n2. two\n10) three"),
    ("> one\n>\n> > two\n> - three", "one\n\ntwo\nthree"),
    (">5 and >= 5\n>:(", ">5 and >= 5\n>:("),
    ("one\n\n---\n\ntwo\n* * *\nthree\n___", "one\n\ntwo\n\nthree\n"),
    ("-- one\n--> two\n-", "-- one\n--> two\n-"),
    # HTML: tags and comments are left out, and so are whole tables and preformatted text.
    ("a <b>b</b> H<sub>2</sub>O <span class=\"x\">c</span>", "a b H2O c"),
    ("one<br>two<br />three", "one\ntwo\nthree"),
    ("<!-- one\ntwo --> three <!-- four --> five", " three  five"),
    ("one\n<table border='1'>\n<tr><td>2</td></tr>\n</table>\n<PRE>a</PRE>\n<BR>three", "one\n\nthree"),
    # Inside a line, they may be what the sentence is about, and do not begin what is left out.
    ("Use a <table> element, then style it. It helps.", "Use a <table> element, then style it. It helps."),
    ("I use <pre> tags a lot.\nThey matter.", "I use <pre> tags a lot.\nThey matter."),
    ("- <table>: rows\n- [ ] <pre>: code", "<table>: rows\n<pre>: code"),
    ("It begins with <!--. Then two\nthree", "It begins with <!--. Then two\nthree"),
    ("I think <think> is a tag. Really.", "I think  is a tag. Really."),
    # Reasoning is left out, closed or not, where it begins a line.
    ("<think>\nHm, *what*?\n\n</think>\n\n# One", "One"),
    ("<think>a</think>- one\n<thinking>b</thinking>\ntwo", "one\n\ntwo"),
    ("<reasoning>a</reasoning>one\n<thought>b", "one\n"),
    ("<Think>a</think>one\n<thinking>b</THINKING>two", "one\ntwo"),
    ("<PRE>a</Pre>one\n<table>b</TABLE>two", "one\ntwo"),
    ("one</think> two", "one two"),
    # Tool calls are left out wherever they begin.
    ('One. <tool_call>{"name": "a"}</tool_call> Two.', "One.  Two."),
    ('<tool_call>\n{"name": "a"}\n</tool_call>\n<tool_call>\n<function=a>', ""),
    ("One.<TOOL_CALL>get\n<arg_key>a</arg_key></tool_call>", "One."),
    ("I think <tool_call> is a tag. <tool_call> ", "I think  is a tag.  "),
]  # fmt: skip

MARKUP = [
    "*", "**", "***", "_", "__", "~", "~~", "~~~", "`", "```", "```py", "[", "]", "(", ")", "](", "](u)", "!", "![",
    "<", "<b>", "</b>", "<br>", "<a", "<think>", "</think>", "<!--", "-->", "<pre>", "</pre>", "<https://x.y>",
    "http://x.y", "www.z", "h", "w", "https:", "|", "|a|", "|---|", "\n|---|\n", "#", "##", "-", "---", "+", ">",
    "=", "==", "1.", "\\", "\\*", "[x]", '"', "a", "b_c", "5", ".", "字", "é", "🙂",
    " ", " ", "  ", "\n", "\n", "\n\n", "\r\n", "\t",
]  # fmt: skip


def spoken_parts(pieces: list[str], prompt: str = "") -> list[str]:
    spoken = SpokenTextFilter(prompt)
    return [*(spoken.push(piece) for piece in pieces), spoken.finish()]


def in_random_pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 4)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(("written", "spoken"), WRITTEN_AND_SPOKEN)
def test_what_is_spoken_does_not_depend_on_the_pieces(written: str, spoken: str) -> None:
    assert "".join(spoken_parts([written])) == spoken
    assert "".join(spoken_parts(list(written))) == spoken
    for cut in range(len(written)):
        assert "".join(spoken_parts([written[:cut], written[cut:]])) == spoken
    rng = random.Random(written)
    for _ in range(10):
        assert "".join(spoken_parts(in_random_pieces(written, rng))) == spoken


def test_random_markup_is_read_alike_in_any_pieces() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        written = "".join(rng.choices(MARKUP, k=rng.randint(1, 12)))
        at_once = "".join(spoken_parts([written]))
        assert "".join(spoken_parts(list(written))) == at_once, written
        assert "".join(spoken_parts(in_random_pieces(written, rng))) == at_once, written


@pytest.mark.parametrize("begin", ["`", "[", "[a](", '[a](b "', "<b a='", "x <!--", "| a |", "# *_`[(<|", ""])
@pytest.mark.parametrize("character", "a ([*")
def test_what_stays_open_for_long_is_text_in_any_pieces(begin: str, character: str) -> None:
    rng = random.Random(begin)
    written = begin + character * rng.randint(1001, 1020) + "`](b) \"'>-->\n|---|\nhttps://" + "a/" * 550
    at_once = "".join(spoken_parts([written]))
    assert at_once.startswith(written[: len(begin) + 1].lstrip("# "))
    for _ in range(5):
        assert "".join(spoken_parts(in_random_pieces(written, rng))) == at_once


@pytest.mark.parametrize(
    "pieces_and_spoken",
    [
        # (what is pushed, what is returned), ..., (None, what `finish` returns)
        [("Hel", "Hel"), ("lo wor", "lo wor"), ("ld.", "ld."), (" 5 * 3 a_b", " 5 * 3 a_b"), (None, "")],
        [("Hi!", "Hi"), (" You", "! You"), (" h", " "), ("e", "he"), (" www", " "), ("x", "wwwx")],
        [("one *", "one "), ("two", ""), (" three* four", "two three four"), (None, "")],
        [("one *two", "one "), ("\nthree", "*two\nthree"), (None, "")],
        [("one [", "one "), ("1", ""), ("] two", "[1] two"), (" [three", " "), ("](a", ""), (")", "three")],
        [("- ", ""), ("one\n", "one\n"), ("-", ""), ("5", "-5"), ("\n---", "\n"), (None, "")],
        [("one `a", "one "), (" b", ""), ("` two", "a b two"), (" `c", " "), (None, "`c")],
        [("one\n|", "one\n"), ("x| is", ""), (" 5\n", ""), ("two", "|x| is 5\ntwo"), (None, "")],
        [("one\n| a |\n", "one\n"), ("|--|\n", ""), ("| 1 |\n", ""), ("two", "\ntwo"), (None, "")],
        [("a <", "a "), ("3 b", "<3 b"), (" <b", " "), (">c", "c"), ("\n<think", "\n"), ("> d", "")],
    ],
)
def test_only_what_may_be_markup_is_held_back(pieces_and_spoken: list[tuple[str | None, str]]) -> None:
    pieces = [piece for piece, _ in pieces_and_spoken if piece is not None]
    assert spoken_parts(pieces)[: len(pieces_and_spoken)] == [spoken for _, spoken in pieces_and_spoken]


@pytest.mark.parametrize(
    ("prompt", "spoken"),
    [
        ("Hi <think><|assistant|>\n", "Hm\n\nOne."),
        ("<|assistant|>\n<think>\n\n</think>\n\n", "Hm\n\nOne."),
        ("<|assistant|>\n<think>\n", "One."),
        ("<|assistant|>\n<think>", "One."),
        ("<|assistant|>\n<THINK>", "One."),
    ],
)
def test_reasoning_that_the_prompt_opens_is_left_out(prompt: str, spoken: str) -> None:
    written = "*Hm*\n</think>\n\nOne."
    for pieces in ([written], list(written)):
        assert "".join(spoken_parts(pieces, prompt)) == spoken


def test_each_answer_is_read_on_its_own() -> None:
    assert "".join(spoken_parts(["```\nleft open"])) == ""
    assert "".join(spoken_parts(["one"])) == "one"
