"""Entry point of `omni-server`. A command's module is imported only when that command runs."""

import argparse
import sys
from collections.abc import Callable, Sequence

from omni_server import __version__
from omni_server.cli.command_line import PROGRAM, Parser
from omni_server.cli.process import complain
from omni_server.errors import ConfigError, OmniError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_COMMANDS = {
    "serve": "serve a model over HTTP",
    "check": "tell whether a model fits this machine, and what to change",
    "verify": "compare the answers with those of transformers, and write a report",
    "config": "check, show and list stage configs",
    "replicas": "list the engines of a running server, and replace one",
    "ray": "run whole pipelines on the machines of a Ray cluster",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0 on success, 1 on failure, 2 for wrong usage, config or folder."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = _parsed(words)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except ConfigError as error:
        complain(f"omni-server: error: {error}")
        return EXIT_USAGE
    except OmniError as error:
        complain(f"omni-server: failed: {error}")
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = build_parser(words)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        command: Parser = options.parser
        command.error(_stage_field_hint(unknown) or command.unrecognized(unknown))
    options.words = [parser.prog, *words]
    return options


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Has all commands, and flags for those in `words`."""
    parser: argparse.ArgumentParser = Parser(
        prog=PROGRAM,
        description="Serve a speech-to-speech model that runs as a pipeline of stages, with an "
        "OpenAI-compatible API.",
        epilog="COMMAND --help explains each. In this order: check whether a model fits, then serve it.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"omni-server {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, help_text in _COMMANDS.items():
        command = commands.add_parser(name, help=help_text, allow_abbrev=False)
        if name in words:
            _fill(name, command)
    return parser


def _fill(name: str, parser: argparse.ArgumentParser) -> None:
    """Adds a command's description, flags and function (`run`)."""
    match name:
        case "serve":
            from omni_server.cli.serve import fill
        case "check":
            from omni_server.cli.check import fill
        case "verify":
            from omni_server.cli.verify import fill
        case "config":
            from omni_server.cli.config import fill
        case "replicas":
            from omni_server.cli.replicas import fill
        case "ray":
            from omni_server.cli.ray.command import fill
    fill(parser)


def _stage_field_hint(unknown: Sequence[str]) -> str | None:
    """Explains flags of `vllm serve` that are fields of a stage here."""
    from omni_server.config.stages import ArStage, DiffusionStage

    fields = ArStage.model_fields.keys() | DiffusionStage.model_fields.keys()
    for argument in unknown:
        field = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and field in fields:
            return (
                f"unrecognized argument {argument}: {field} belongs to a stage; set stages.<name>.{field} "
                "in the file that --stage-config names"
            )
    return None


if __name__ == "__main__":
    sys.exit(main())
