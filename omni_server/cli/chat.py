"""`omni-server chat`: talk to a running server in the terminal."""

import argparse
import contextlib
import os
import sys
from pathlib import Path

from omni_server.client import DEFAULT_URL
from omni_server.command_line import options_of, positive_count, program

API_KEY_VARIABLE = "OMNI_SERVER_API_KEY"

_DESCRIPTION = """\
Talk to a running server in the terminal. Text appears while it is generated, and audio is played while it is
generated, if an audio player is installed: aplay, paplay, ffplay or SoX's play."""
_EPILOG = """\
Questions come from the prompt, from --once, or one per line from stdin if that is not a terminal.
Text goes to stdout as it arrives, everything else to stderr. Ctrl-C stops an answer, and ends the chat at the
prompt.

examples:
  {program} chat
  {program} chat --once "Hello, who are you?" --save answers
  {program} chat --audio FILE --once
  printf 'Hello.\\nAnd you?\\n' | {program} chat --text-only

Exit code: 0, 1 if a question was not answered, 2 if no server answers or the command line is wrong,
130 after Ctrl-C."""


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG.format(program=program())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url", default=DEFAULT_URL, help="URL of the server, with or without /v1 (default: %(default)s)"
    )
    server.add_argument(
        "--model", metavar="NAME", help="name of the model to ask (default: the first in /v1/models)"
    )
    server.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"API key, sent as a bearer token (default: the environment variable {API_KEY_VARIABLE}, which "
        "other users of the machine cannot see)",
    )
    question = parser.add_argument_group("questions")
    question.add_argument(
        "--once",
        metavar="QUESTION",
        nargs="?",
        const="",
        help="ask only this; without QUESTION, send the files alone",
    )
    for kind in ("audio", "image", "video"):
        question.add_argument(
            f"--{kind}",
            metavar="FILE",
            type=Path,
            action="append",
            default=[],
            help=f"{kind} file to send with the first question; may be repeated",
        )
    question.add_argument("--system", metavar="TEXT", help="system message (default: the server's)")
    answer = parser.add_argument_group("answers")
    answer.add_argument(
        "--voice", metavar="NAME", help="voice of the speech (default: the first in /v1/models)"
    )
    answer.add_argument(
        "--text-only", dest="is_text_only", action="store_true", help="ask for text without speech"
    )
    answer.add_argument(
        "--save", metavar="DIR", type=Path, help="save spoken answers as DIR/answer-001.wav and so on"
    )
    answer.add_argument("--no-play", dest="plays", action="store_false", help="do not play audio")
    answer.add_argument(
        "--max-tokens",
        metavar="N",
        type=positive_count,
        help="longest text, in tokens (default: the server's)",
    )
    parser.set_defaults(run=lambda options: _chat(parser, options))


def _chat(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from omni_server.chat.conversation import MediaKind  # pydantic and aiohttp: not for --help
    from omni_server.chat.session import ChatOptions, converse, describe, open_chat, talk, tell

    media: list[tuple[MediaKind, Path]] = [("audio", file) for file in options.audio]
    media += [("image", file) for file in options.image]
    media += [("video", file) for file in options.video]
    if options.is_text_only and (options.voice is not None or options.save is not None):
        parser.error("--text-only asks for no speech: leave --voice and --save out")
    if options.once == "" and not media:
        parser.error("--once needs a QUESTION, or a file: --audio, --image or --video")
    key = options.api_key or os.environ.get(API_KEY_VARIABLE) or None
    wanted = options_of(ChatOptions, options, api_key=key, media=tuple(media))

    with contextlib.closing(open_chat(wanted)) as chat:
        tell(describe(chat, wanted))
        if options.once is not None:
            return converse(chat, [options.once])
        if sys.stdin.isatty():
            import readline  # noqa: F401 - lets `input` edit lines

            tell("/help lists commands, Ctrl-D ends")
            return talk(chat)
        return converse(chat, (line.strip() for line in sys.stdin))
