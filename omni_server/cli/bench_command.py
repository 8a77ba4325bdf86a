"""`omni-server bench`: the load generator, which scripts/bench_serving runs too."""

import argparse

from omni_server.bench import arguments
from omni_server.command_line import program


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench`."""
    parser = commands.add_parser(
        "bench",
        help="load a running server and measure what its callers would",
        description=arguments.DESCRIPTION,
        epilog=arguments.EPILOG.format(program=f"{program()} bench"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    arguments.add_arguments(parser)
    parser.set_defaults(run=lambda options: _bench(arguments.check(parser, options)))


def _bench(options: argparse.Namespace) -> int:
    from omni_server.bench.main import run_command  # numpy and aiohttp: not for --help

    return run_command(options, options.words)
