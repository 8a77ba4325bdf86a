"""MODEL and --demo, shared by the commands that run or check a model."""

import argparse
from importlib.resources import files
from pathlib import Path

from omni_server.config.model_folder import EXAMPLE_MODEL

SPEAKING_DEMO = "speaking-demo"
"""The name that the demo model is served under."""


def add_model_flags(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"local folder or hub id, such as {EXAMPLE_MODEL} (default: the demo model that comes with the "
        "package)",
    )
    parser.add_argument("--demo", action="store_true", help="use the demo model, as without MODEL")


def refuse_two_models(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits with code 2 if --demo or --revision contradicts MODEL."""
    if options.model == "":
        parser.error("MODEL is empty")
    if options.model is not None and options.demo:
        parser.error("MODEL and --demo contradict each other: give one of them")
    if options.model is None and options.revision is not None:
        parser.error("--revision needs a MODEL")


def speaking_demo() -> Path:
    """Returns the folder of the demo model, a trained checkpoint in the package."""
    return Path(str(files("stages.qwen2_5_omni"))) / "speaking_demo"
