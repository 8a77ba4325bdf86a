"""MODEL and --demo, shared by the commands that run or check a model."""

import argparse
from collections.abc import Callable

from omni_server.demos import DEFAULT_DEMO, DEMOS
from omni_server.model_folder import EXAMPLE_MODEL


def add_model_flags(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"local folder or hub id, such as {EXAMPLE_MODEL} (default: the demo model that comes with the "
        "package)",
    )
    parser.add_argument(
        "--demo",
        choices=tuple(DEMOS),
        help="demo model to use instead of MODEL; speaking: trained, comes with the package; qwen3_omni and "
        "images: random weights, made in seconds, they answer with noise "
        f"(default: {DEFAULT_DEMO})",
    )


def refuse_two_models(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits with code 2 if --demo or --revision contradicts MODEL."""
    if options.model == "":
        parser.error("MODEL is empty")
    if options.model is not None and options.demo is not None:
        parser.error("MODEL and --demo contradict each other: give one of them")
    if options.model is None and options.revision is not None:
        parser.error("--revision needs a MODEL")


def model_or_demo(model: str | None, demo: str | None, on_progress: Callable[[str], None]) -> str:
    """Returns `model`, or without one the folder of a demo model, which may be made now. Raises
    `ConfigError` if that is impossible."""
    return str(DEMOS[demo or DEFAULT_DEMO].folder(on_progress)) if model is None else model
