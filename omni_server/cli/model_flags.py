"""Flags shared by the commands that run or check a model: which checkpoint runs, where and how."""

import argparse
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import get_args

from omni_server.check.placement import Quantization
from omni_server.check.stage_flags import StageFlags
from omni_server.cli.command_line import options_of, positive_count
from omni_server.config.model_folder import EXAMPLE_MODEL
from omni_server.config.stage_config import MAX_MEMORY_FRACTION
from omni_server.errors import ConfigError

SPEAKING_DEMO = "speaking-demo"
"""The name that the demo model is served under."""


def add_model_flags(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add MODEL, --demo, --revision, --stage-config and --cpu."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"local folder or hub id, such as {EXAMPLE_MODEL} (default: the demo model that comes with the "
        "package)",
    )
    parser.add_argument("--demo", action="store_true", help="use the demo model, as without MODEL")
    parser.add_argument(
        "--revision", help="branch, tag or commit of the hub repository (default: its main branch)"
    )
    parser.add_argument(
        "--stage-config",
        metavar="FILE",
        help="stage config, or the name of a shipped one (default: one made for this model and the GPUs of "
        "this machine, which 'omni-server check' prints)",
    )
    parser.add_argument(
        "--cpu",
        dest="use_cpu",
        action="store_true",
        help="run on the CPU; published models run much slower than real time",
    )


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


def add_stage_flags(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add --speech-model and the flags that decide fields of stages."""
    parser.add_argument(
        "--speech-model",
        metavar="TTS",
        help="local folder or hub id of a Qwen3-TTS model, which reads the answers of MODEL, a language "
        "model, aloud (default: the stage config's)",
    )
    parser.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        help="weight precision of the language model that reads the prompt; fp8: quantized while the weights "
        "load; awq, gptq: as in the checkpoint (default: the checkpoint's own)",
    )
    numbers: tuple[tuple[str, Callable[[str], float], str], ...] = (
        ("max-model-len", positive_count, "longest prompt and answer, in tokens, of the stage that reads it"),
        ("tensor-parallel-size", positive_count, "ranks of that stage; it needs as many devices"),
        ("gpu-memory-utilization", _memory_share, "share of a GPU's memory for all stages on it together"),
    )
    for name, kind, text in numbers:
        parser.add_argument(f"--{name}", metavar="N", type=kind, help=f"{text} (default: the stage config's)")


def _memory_share(text: str) -> float:
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", text) or not 0 < float(text) <= MAX_MEMORY_FRACTION:
        raise argparse.ArgumentTypeError(f"'{text}' is not more than 0 and at most {MAX_MEMORY_FRACTION}")
    return float(text)


def stage_flags(options: argparse.Namespace) -> StageFlags:
    """Raises `ConfigError` if they contradict --stage-config or --cpu."""
    flags = options_of(StageFlags, options)
    if options.use_cpu:
        flags.refuse_cpu()
    if options.stage_config is not None and flags.quantization is not None:
        raise ConfigError(
            "--quantization decides how a stage config is made, and --stage-config names one: set "
            "engine_args.quantization of the stage in it instead"
        )
    return flags
