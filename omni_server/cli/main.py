"""Entry point of the command `omni-server`."""

import argparse
import sys
from collections.abc import Callable, Sequence

from omni_server import __version__
from omni_server.cli import bench_command, chat_command, check_command, config_command, serve, verify
from omni_server.cli.standard_streams import complain
from omni_server.command_line import PROGRAM, Parser
from omni_server.config.stages import ArStage, DiffusionStage
from omni_server.errors import ConfigError, OmniError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 1: failed while running; 2: wrong usage, config or model folder."""
    parser = _build_parser()
    words = sys.argv[1:] if arguments is None else list(arguments)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        command: Parser = options.parser
        command.error(_stage_field_hint(unknown) or command.unrecognized(unknown))
    options.words = [parser.prog, *words]
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except ConfigError as error:
        complain(f"omni-server: error: {error}")
        return EXIT_USAGE
    except OmniError as error:
        complain(f"omni-server: failed: {error}")
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _build_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = Parser(
        prog=PROGRAM,
        description="Serve a speech-to-speech model that runs as a chain of stages, with an OpenAI-compatible API.",
        epilog="COMMAND --help explains each. In this order: check whether a model fits, serve it, chat with it.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"omni-server {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve.add_parser(commands)
    chat_command.add_parser(commands)
    bench_command.add_parser(commands)
    check_command.add_parser(commands)
    verify.add_parser(commands)
    config_command.add_parser(commands)
    return parser


def _stage_field_hint(unknown: Sequence[str]) -> str | None:
    """Users of `vllm serve` set one engine's arguments by flag; here each stage has its own."""
    fields = ArStage.model_fields.keys() | DiffusionStage.model_fields.keys()
    for argument in unknown:
        field = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and field in fields:
            return (
                f"unrecognized argument {argument}: {field} belongs to a stage; set stages.<name>.{field} in the file "
                "that --stage-config names"
            )
    return None


if __name__ == "__main__":
    sys.exit(main())
