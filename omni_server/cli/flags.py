"""What the commands' flags share: the types of values, each of which raises `argparse.ArgumentTypeError`, and
the flags that say where and how a model runs."""

import argparse
import json
import re
from typing import get_args

from omni_server.check.placement import Quantization
from omni_server.errors import ConfigError

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port: 0 to 65535")
    return int(text)


def seconds(text: str) -> float:
    value = seconds_or_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return value


def seconds_or_zero(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")
    return float(text)


def size(text: str) -> int:
    """Bytes."""
    match = re.fullmatch(r"(\d+)([kmg]?)(?:i?b)?", text.lower())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size: a number of bytes, or as in 512K, 64M, 1G")
    return int(match[1]) * _UNITS[match[2]]


def count(text: str) -> int:
    """A whole number that is not negative."""
    if not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 0 or more")
    return int(text)


def positive_count(text: str) -> int:
    value = count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def words(texts: list[str]) -> tuple[str, ...]:
    """The words of a flag with `nargs="+"`; vLLM's users give them as one JSON list."""
    if len(texts) == 1 and texts[0].startswith("["):
        try:
            parsed = json.loads(texts[0])
        except ValueError:
            parsed = None
        if not isinstance(parsed, list) or not all(isinstance(item, str) for item in parsed):
            raise argparse.ArgumentTypeError(f"'{texts[0]}' is not a JSON list of strings")
        return tuple(parsed)
    return tuple(texts)


def add_placement_flags(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add --stage-config and --cpu."""
    parser.add_argument(
        "--stage-config",
        metavar="FILE",
        help="stage config, or the name of a shipped one (default: one made for this model and the GPUs of "
        "this machine, which 'omni-server check' prints)",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run on the CPU; published models run much slower than real time"
    )


def add_quantization_flag(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    parser.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        help="weight precision of the thinker's language model; fp8: quantized while the weights load; awq, "
        "gptq: as in the checkpoint (default: the checkpoint's own)",
    )


def refuse_contradictions(stage_config: str | None, quantization: str | None) -> None:
    """Raises `ConfigError` for --quantization together with --stage-config."""
    if stage_config is not None and quantization is not None:
        raise ConfigError(
            "--quantization decides how a stage config is made, and --stage-config names one: set "
            "engine_args.quantization of its thinker instead"
        )
