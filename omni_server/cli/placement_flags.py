"""Flags shared by several commands: which checkpoint runs, where and how."""

import argparse
from typing import get_args

from omni_server.check.placement import Quantization
from omni_server.errors import ConfigError


def add_placement_flags(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add --revision, --stage-config and --cpu."""
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


def add_quantization_flag(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    parser.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        help="weight precision of the language model that reads the prompt; fp8: quantized while the weights "
        "load; awq, gptq: as in the checkpoint (default: the checkpoint's own)",
    )


def refuse_contradictions(stage_config: str | None, quantization: str | None) -> None:
    """Raises `ConfigError` for --quantization together with --stage-config."""
    if stage_config is not None and quantization is not None:
        raise ConfigError(
            "--quantization decides how a stage config is made, and --stage-config names one: set "
            "engine_args.quantization of the stage in it instead"
        )
