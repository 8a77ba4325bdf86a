"""`omni-server check`: would MODEL start here?"""

import argparse
import re
import sys

from omni_server.api.config import ApiConfig
from omni_server.config.load import find_shipped_config, find_stage_config
from omni_server.model_folder import CPU_CONFIG, EXAMPLE_MODEL, GPU_CONFIG, default_stage_config

_DEFAULTS = ApiConfig()
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
DOES_NOT_FIT = 2


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `check`."""
    parser = commands.add_parser(
        "check",
        help="tell whether a model fits this machine, and what to change",
        description="Tell whether a model would start here with a stage config, without starting it: memory of each "
        "stage, missing and damaged files, shared memory, the port, the installation. Reads headers of weights, not "
        "the weights; of a model on the hub it downloads the small files only.",
        epilog="Exit code: 0 if it fits (perhaps with warnings), 2 if not.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help=f"local folder or hub id, such as {EXAMPLE_MODEL}")
    parser.add_argument(
        "--stage-config",
        metavar="FILE",
        help="stage config, or the name of a shipped one "
        f"(default: {GPU_CONFIG} if there is an NVIDIA GPU or with --device-memory, else {CPU_CONFIG})",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the hub repository (default: its main branch)")
    parser.add_argument(
        "--load-format",
        choices=("auto", "safetensors", "dummy"),
        default="auto",
        help="as of 'serve'; dummy: the folder needs no weights (default: %(default)s)",
    )
    parser.add_argument(
        "--device-memory",
        metavar="SIZE",
        type=_size,
        help="check for another machine, whose GPUs have this much memory each, as in 80G or 24G; files and memory are "
        "checked, nothing else of this machine",
    )
    parser.add_argument("--host", default=_DEFAULTS.host, help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=_DEFAULTS.port, help="port to listen on (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    parser.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    from omni_server.check.render import as_json, as_text
    from omni_server.check.run import CheckOptions, check

    if options.stage_config is not None:
        path = find_stage_config(options.stage_config)
    elif options.device_memory is not None:
        path = find_shipped_config(GPU_CONFIG)
    else:
        path = default_stage_config()
    wanted = CheckOptions(
        model=options.model,
        stage_config=path,
        revision=options.revision,
        load_format=options.load_format,
        device_memory=options.device_memory,
        host=options.host,
        port=options.port,
    )
    report = check(wanted, on_progress=lambda line: print(line, file=sys.stderr))
    print(as_json(report) if options.json else as_text(report))
    return 0 if report.fits else DOES_NOT_FIT


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", text.lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no size: a number of bytes, or as in 80G")
    return int(float(match[1]) * _UNITS[match[2]])
