"""`omni-server verify`: does this server answer as transformers does?"""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from omni_server.cli.standard_streams import complain
from omni_server.cli.values import seconds
from omni_server.model_folder import EXAMPLE_MODEL

DEFAULT_TIMEOUT_S = 1800.0
EXIT_CODES = {True: 0, False: 1}
"""By whether all cases agree."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `verify`."""
    parser = commands.add_parser(
        "verify",
        help="compare the answers with those of transformers, and write a report",
        description="Answer prompts of every kind (text, sound, pictures, video; in text and in every "
        "voice), then ask transformers the same on the same machine, and compare text, codec tokens and "
        "waveforms. Measures first audio and the real-time factor. All of it goes into one Markdown file that "
        "can be attached to an issue: it holds no paths, no host name and no environment. Takes minutes; "
        "nothing else should run on the machine meanwhile.",
        epilog="Exit code: 0 if all agree, 1 if something differs or could not be compared, 2 for wrong usage "
        "or a model that does not start, 130 after Ctrl-C. docs/verify.md says how it compares.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help=f"local folder or hub id, such as {EXAMPLE_MODEL}")
    parser.add_argument(
        "--stage-config",
        metavar="FILE",
        help="stage config, or the name of a shipped one (default: the one that 'serve' would make)",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="run on the CPU; published models run much slower than real time",
    )
    parser.add_argument("--revision", help="branch, tag or commit on the hub (default: its main branch)")
    parser.add_argument(
        "--report",
        metavar="FILE",
        type=Path,
        help="file to write, which must not exist (default: omni-server-verify-MODEL.md or, in turn, -2.md)",
    )
    parser.add_argument(
        "--cases",
        metavar="CASES",
        help="the first so many prompts, as in 2, or those named, as in 'text,read aloud' (default: all)",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        default=DEFAULT_TIMEOUT_S,
        help="longest wait for one answer, of either side (default: %(default)g)",
    )
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    from omni_server.verify.render import as_markdown, as_table  # numpy and torch: not for --help
    from omni_server.verify.report_file import ReportFile
    from omni_server.verify.run import VerifyOptions, verify

    file = ReportFile(options.report, options.model)
    wanted = VerifyOptions(
        model=options.model,
        stage_config=options.stage_config,
        use_cpu=options.cpu,
        revision=options.revision,
        cases=options.cases,
        timeout_s=options.timeout,
    )
    with _sigterm_as_ctrl_c():
        report = verify(wanted, _progress_printer())
    print(as_table(report))
    try:
        print(f"report: {file.write(as_markdown(report))}")
    except OSError as error:
        complain(f"omni-server: failed: the report cannot be written: {error}")
        return EXIT_CODES[False]
    return EXIT_CODES[report.agrees]


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM ends the engines, too."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _progress_printer() -> Callable[[str], None]:
    began = time.monotonic()

    def print_progress(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {line}", file=sys.stderr, flush=True)

    return print_progress
