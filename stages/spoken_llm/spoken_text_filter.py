"""Decides what of a language model's answer is spoken, while it is being written. The table in
`tests/unit/stages/spoken_llm/test_spoken_text_filter.py` shows what each kind of markup becomes.
"""

import re
from collections import defaultdict

_REASONING = "think(?:ing)?|thought|reasoning|seed:think"
_TAGS = rf"""{_REASONING}|tool_call|a|b|blockquote|br|center|code|del|details|div|em|font|h[1-6]|hr|i|img|ins
             |kbd|li|mark|ol|p|s|small|span|strong|sub|summary|sup|u|ul"""
_TAG_END = r"""(?: [ \t]+ [\w:-]+ = (?: "[^"<>\n]*" | '[^'<>\n]*' ) )* [ \t]* /? >"""
_JOINED = r"\u0e00-\U0010ffff"  # from Thai on, words are joined: marks and URLs may follow letters directly
_URL_CHARACTER = rf"[^\s<>()\[\]\"`*|{_JOINED}]"
_URL = rf"(?: https?:// | www\. ) (?: {_URL_CHARACTER} | \( {_URL_CHARACTER}* \) )*"
_LABEL = r"(?: [^\[\]\n]++ | \[ [^\[\]\n]*+ \] )*+"
_TARGET = r"(?: [^\s()]++ | \( [^\s()]*+ \) )*+"
_LINK_END = rf'\] \( {_TARGET} (?: [ ]+ "[^"\n]*" )? \)'
_LONGEST = 1000  # characters that may wait for the end of a construct, so that reading takes linear time

# In both patterns, `wait` is what may still become markup. Everything else is followed by what ends it, so
# that the result does not depend on how the text was cut.
_AT_LINE_START = re.compile(
    rf"""
      (?P<wait> (?! (?s:.){{{_LONGEST}}} )
                (?: [ \t\r>\#*+=_~`-]*
                  | [ \t]*+ (?: `{{3,}} [^`\n]* | \| [^\n]* (?: \n [ \t\r>|:-]* )?
                             | [-*+] [ \t]+ \[ (?: [ xX] (?: \] [ \t]* )? )? ) ) \Z )
    | [ \t]*+ (?: (?P<fence> `{{3,99}}+ (?= [^`\n]* \n ) | ~{{3,99}}+ )
               | (?P<table> \| [^\n]* \n [ \t>]* \| (?= [^\n]* - ) [ \t\r|:-]* (?= \n ) )
               | (?P<rule> (?: (?P<dash> [-*_] ) (?: [ \t]* (?P=dash) ){{2,}} | ={{2,}} ) [ \t\r]* (?= \n ) )
               | (?P<heading> \#{{1,6}} [ \t]+ ) | (?P<quote> > (?= [\s>] ) [ \t]? )
               | (?P<bullet> [-*+] [ \t]+ (?: \[ [ xX] \] [ \t]+ )? (?= \S ) ) )
    | < (?P<left_out> !-- | (?i: {_REASONING} | table | pre ) (?= {_TAG_END} ) )
    """,
    re.VERBOSE,
)
_IN_LINE = re.compile(
    rf"""
      (?P<code> (?P<ticks> `++ ) (?P<words> [^\n]+? ) (?<! ` ) (?P=ticks) (?= [^`] ) )
    | (?P<wait> (?! (?s:.){{{_LONGEST}}} )
                (?: [*_~]++ | ` [^\n]* | \\
                  | !? (?: \[ {_LABEL} (?: \[ [^\[\]\n]* )? )?
                       (?: \] (?: \( {_TARGET} (?: \( [^\s()]* | [ ]+ (?: "[^"\n]*"? )? )? )? )?
                  | < (?: !?-? | !-- (?: (?! --> ) . )* | /? [\w:]* | (?i: tool_call ) > \s?
                        | /? (?i: {_TAGS}|table|pre ) [ \t/] [^<>\n]* | https?: [^\s<>]* )
                  | (?<! [^\W_{_JOINED}] ) (?: ht{{0,2}}p?s?:?/? | w{{1,3}}
                                       | {_URL} (?: \( {_URL_CHARACTER}* )? ) ) \Z )
    | < (?P<left_out> (?i: tool_call ) (?= > (?: \w | \s? [{{<] ) ) )
    | (?P<newline> \n | < (?i: br ) {_TAG_END} ) | (?P<fence> `{{3,99}}+ (?= [^`\n]* \n ) )
    | (?P<tag> <!-- .*? --> | </? (?i: {_TAGS} ) {_TAG_END} | < https?:// [^\s<>]* > )
    | (?P<url> (?P<gap> (?<= \s ) )? (?<! [^\W_{_JOINED}] ) {_URL} (?<! [.,;:!?'_~] ) (?(gap) [ ]? ) )
    | (?P<link> !? \[ (?= {_LABEL} {_LINK_END} ) | {_LINK_END} | \[\^ \w+ \] )
    | (?P<mark> (?! (?P<char> [*_~] ) (?P=char){{3}} )
                (?P<closes> (?<= \S ) (?! _+ [^\W_] ) )?  # not snake_case
                (?P<opens> (?<! [^\W_{_JOINED}] ) (?! [*_~]++ \s ))? (?: \*\*? | __? | ~~ ) )  # not 3*4*5
    | \\ (?P<escaped> [*_`~\#|<>$] ) | (?P<text> \*+ | _+ | ~+ | `+ | [^\W_{_JOINED}]+ | [{_JOINED}]+ | . )
    """,
    re.VERBOSE,
)


class SpokenTextFilter:
    """Implements `omni_server.family.speech_text.SpokenTextFilter`."""

    def __init__(self, prompt: str = "") -> None:
        self._text, self._position = "\n", 1  # keeps the last character read: patterns look behind
        reasoning = re.search(rf"(?i)<({_REASONING})>\s*\Z", prompt)
        self._left_out_until = f"</{reasoning[1]}>" if reasoning else ""
        self._num_newlines = 2  # since the last word or bullet
        self._pieces: list[str] = []
        self._num_spoken = 0
        self._open_marks: dict[str, list[int]] = defaultdict(list)  # pieces that a mark in the line may close

    def push(self, text: str) -> str:
        self._text, self._position = self._text[self._position - 1 :] + text, 1
        return self._read(len(self._text))

    def finish(self) -> str:
        end = len(self._text)
        self._text += "\n\n"  # end what may still be markup, and are not read themselves
        return self._read(end) + "".join(self._pieces[self._num_spoken :])

    def _read(self, end: int) -> str:
        while self._position < end:
            if self._left_out_until:
                token = re.compile(self._left_out_until, re.IGNORECASE).search(self._text, self._position)
                if token is None:
                    self._position = max(self._position, self._text.rfind("\n"), len(self._text) - _LONGEST)
                    break
                self._left_out_until = ""
            else:
                window = self._text, self._position, self._position + _LONGEST
                token = _AT_LINE_START.match(*window) if self._num_newlines else None
                token = token or _IN_LINE.match(*window)
                assert token is not None
                if token.lastgroup == "wait":
                    break
                self._take(token)
            self._position = token.end()
        start = self._num_spoken
        open_marks = [marks[0] for marks in self._open_marks.values() if marks]
        self._num_spoken = min(open_marks, default=len(self._pieces))
        return "".join(self._pieces[start : self._num_spoken])

    def _take(self, token: re.Match[str]) -> None:
        text = token.group()
        match token.lastgroup:
            case "fence":
                self._left_out_until = rf"\n[ \t>]{{0,99}}{text.strip()}[`~]{{0,99}}[ \t\r]{{0,99}}(?=\n)"
            case "table":
                self._left_out_until = r"(?=\n[ \t>]{0,99}[^ \t>|])"
            case "left_out":
                self._left_out_until = "-->" if text == "<!--" else f"</{text[1:]}>"
            case "bullet":
                self._num_newlines = 0
            case "newline":
                self._open_marks.clear()
                self._pieces.append("\n" if self._num_newlines < 2 else "")
                self._num_newlines += 1
            case "mark" if token["closes"] is not None and self._open_marks[text]:
                self._pieces[self._open_marks[text].pop()] = ""
            case "mark" | "code" | "escaped" | "text":
                if token["opens"] is not None:
                    self._open_marks[text].append(len(self._pieces))
                spoken = token["words"] or token["escaped"] or text
                self._pieces.append(spoken)
                if spoken.strip():
                    self._num_newlines = 0
