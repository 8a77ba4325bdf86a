"""`omni-server check`: would MODEL start here?"""

import argparse
import re
import sys
from functools import partial

from omni_server.cli.command_line import options_of
from omni_server.cli.model_flags import (
    add_model_flags,
    add_stage_flags,
    refuse_two_models,
    speaking_demo,
    stage_flags,
)
from omni_server.config.load import find_stage_config

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
EXIT_CODES = {True: 0, False: 2, None: 1}
"""By whether the model fits; None if unknown."""


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Tell whether a model would start here with a stage config, without starting it. Checks the memory "
        "of each stage, missing and damaged files, shared memory and the installation. Reads the headers of "
        "weight files, not the weights; downloads only the small files of a model on the hub."
    )
    parser.epilog = (
        "Exit code: 0 if it fits (perhaps with warnings), 2 if not, 1 if that is not known because the hub "
        "cannot be reached."
    )
    add_model_flags(parser)
    add_stage_flags(parser)
    parser.add_argument(
        "--load-format",
        choices=("auto", "safetensors", "dummy"),
        default="auto",
        help="as of 'serve'; dummy: the folder needs no weights (default: %(default)s)",
    )
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        type=_sizes,
        help="check for another machine, with one GPU of this much memory, as in 80G, or several, as in "
        "24G,24G; checks files and memory only",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    parser.set_defaults(run=lambda options: _check(parser, options))


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    refuse_two_models(parser, options)
    flags = stage_flags(options)
    from omni_server.check.report import as_json, as_text
    from omni_server.check.run import CheckOptions, check

    path = None if options.stage_config is None else find_stage_config(options.stage_config)
    on_progress = partial(print, file=sys.stderr)
    model = options.model or str(speaking_demo())
    checked = options_of(CheckOptions, options, model=model, stage_config=path, flags=flags)
    report = check(checked, on_progress)
    print(as_json(report) if options.json else as_text(report))
    return EXIT_CODES[report.fits]


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(part) for part in text.split(","))


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", text.lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size: a number of bytes, or as in 80G")
    return int(float(match[1]) * _UNITS[match[2]])
