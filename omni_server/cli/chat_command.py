"""`omni-server chat`: talk to a running server in the terminal."""

import argparse
import os
import sys
from pathlib import Path

from omni_server.api.config import ApiConfig
from omni_server.command_line import program

API_KEY_VARIABLE = "OMNI_SERVER_API_KEY"

_DEFAULTS = ApiConfig()
_DESCRIPTION = """\
Talk to a running server in the terminal. Text appears while it is written, and sound is played while it is spoken, if
a program that plays sound is installed: aplay, paplay, ffplay or SoX's play."""
_EPILOG = """\
Questions come from the prompt; or one per line from stdin, where that is no terminal; or from --once.
Text goes to stdout as it comes, everything else to stderr. Ctrl-C stops an answer; at the prompt it ends.

examples:
  {program} chat
  {program} chat --once "Hello, who are you?" --save answers
  {program} chat --audio FILE --once
  printf 'Hello.\\nAnd you?\\n' | {program} chat --text-only

Exit code: 0, 1 if a question was not answered, 2 if no server answers or the command line is wrong,
130 after Ctrl-C."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `chat`."""
    parser = commands.add_parser(
        "chat",
        help="talk to a running server in the terminal",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(program=program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    server = parser.add_argument_group("the server")
    server.add_argument(
        "--url",
        default=f"http://{_DEFAULTS.host}:{_DEFAULTS.port}",
        help="where the server is, with or without /v1 (default: %(default)s)",
    )
    server.add_argument("--model", metavar="NAME", help="served name to ask for (default: the first of /v1/models)")
    server.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"sent as a bearer token (default: the variable {API_KEY_VARIABLE}, which other users of the machine "
        "cannot see)",
    )
    question = parser.add_argument_group("questions")
    question.add_argument(
        "--once", metavar="QUESTION", nargs="?", const="", help="ask this one; without QUESTION the files alone"
    )
    for kind in ("audio", "image", "video"):
        question.add_argument(
            f"--{kind}",
            metavar="FILE",
            type=Path,
            action="append",
            default=[],
            help="goes with the first question; may be repeated",
        )
    question.add_argument("--system", metavar="TEXT", help="system message (default: the server's)")
    answer = parser.add_argument_group("answers")
    answer.add_argument("--voice", metavar="NAME", help="of the speech (default: the first that the server lists)")
    answer.add_argument("--text-only", action="store_true", help="ask for no speech")
    answer.add_argument("--save", metavar="DIR", type=Path, help="keep each spoken answer as DIR/answer-001.wav and on")
    answer.add_argument("--no-play", action="store_true", help="play no sound")
    answer.add_argument("--max-tokens", metavar="N", type=_count, help="longest text (default: the server's)")
    parser.set_defaults(run=lambda options: _chat(parser, options))


def _chat(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from omni_server.chat.media import MediaKind  # pydantic and aiohttp: not for --help
    from omni_server.chat.prompt import talk
    from omni_server.chat.session import Chat, ChatOptions, converse, describe, open_chat, tell

    media: list[tuple[MediaKind, Path]] = [("audio", file) for file in options.audio]
    media += [("image", file) for file in options.image]
    media += [("video", file) for file in options.video]
    if options.text_only and (options.voice is not None or options.save is not None):
        parser.error("--text-only asks for no speech: leave --voice and --save out")
    if options.once == "" and not media:
        parser.error("--once needs a QUESTION, or a file: --audio, --image or --video")
    wanted = ChatOptions(
        url=options.url,
        model=options.model,
        voice=options.voice,
        is_text_only=options.text_only,
        system=options.system,
        max_tokens=options.max_tokens,
        api_key=options.api_key or os.environ.get(API_KEY_VARIABLE) or None,
        save=options.save,
        plays=not options.no_play,
        media=tuple(media),
    )

    def run(chat: Chat) -> int:
        tell(describe(chat, wanted))
        if options.once is not None:
            return converse(chat, iter([options.once, None]).__next__)
        if sys.stdin.isatty():
            import readline  # noqa: F401 - lets `input` edit lines

            tell("/help lists commands, Ctrl-D ends")
            return talk(chat)
        return converse(chat, lambda: next((line.strip() for line in sys.stdin), None))

    chat = open_chat(wanted)
    try:
        return run(chat)
    finally:
        chat.close()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of tokens")
    return int(text)
