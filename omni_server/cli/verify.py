"""`omni-server verify`: compare this server with the reference implementation of its model."""

import argparse
import signal
import sys
from functools import partial
from pathlib import Path

from omni_server.cli.command_line import options_of, seconds
from omni_server.cli.model_flags import add_model_flags, refuse_two_models, speaking_demo
from omni_server.cli.process import complain, progress_printer

DEFAULT_TIMEOUT_S = 1800.0
EXIT_CODES = {True: 0, False: 1}
"""By whether all cases agree."""


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer prompts of every kind (text, audio, images, video; as text and in every voice), then ask "
        "the model's reference implementation (transformers, or its authors' package) the same on the same "
        "machine, and compare text, codec tokens and waveforms. Writes one Markdown file that can be "
        "attached to an issue: it holds no paths, no host name and no environment. Takes minutes."
    )
    parser.epilog = (
        "Exit code: 0 if all agree, 1 if something differs or could not be compared, 2 for wrong usage or a "
        "model that does not start or has no reference, 130 after Ctrl-C. docs/verify.md says how it "
        "compares."
    )
    add_model_flags(parser)
    parser.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="file to write, which must not exist (default: omni-server-verify-MODEL.md, or with -2, -3 and "
        "so on)",
    )
    parser.add_argument(
        "--cases",
        metavar="CASES",
        help="number of prompts to run, as in 2, or their names, as in 'text,read aloud' (default: all)",
    )
    parser.add_argument(
        "--timeout",
        dest="timeout_s",
        metavar="SECONDS",
        type=seconds,
        default=DEFAULT_TIMEOUT_S,
        help="longest wait for one answer, of either side (default: %(default)g)",
    )
    parser.set_defaults(run=lambda options: _verify(parser, options))


def _verify(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    refuse_two_models(parser, options)
    from omni_server.verify.report import (  # numpy and torch: not for --help
        as_markdown,
        as_table,
        new_report_file,
    )
    from omni_server.verify.run import VerifyOptions, verify

    on_progress = progress_printer(partial(print, file=sys.stderr, flush=True))
    options.model = options.model or str(speaking_demo())
    # SIGTERM ends the engines, too.
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    with new_report_file(options.report, options.model) as file:
        report = verify(options_of(VerifyOptions, options), on_progress)
        print(as_table(report))
        try:
            file.write_text(as_markdown(report), encoding="utf-8")
        except OSError as error:
            file.unlink(missing_ok=True)
            complain(f"omni-server: failed: the report cannot be written: {error}")
            return EXIT_CODES[False]
    print(f"report: {file}")
    return EXIT_CODES[report.agrees]
