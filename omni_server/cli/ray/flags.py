"""The flags of `omni-server ray deploy`, which a Ray Serve config file has as a list."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from omni_server.cli.command_line import PROGRAM, Parser, options_of, positive_count
from omni_server.cli.ray.options import RAY_API, RayOptions, pipeline_needs, refuse_web_server_flags
from omni_server.cli.serve_flags import ServeOptions, add_serve_flags, serve_options
from omni_server.config.load import find_stage_config, load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError


def fill_deploy(parser: argparse.ArgumentParser) -> None:
    """Adds all flags."""
    group = parser.add_argument_group("Ray")
    group.add_argument(
        "--address", default="auto", help="of the cluster, as ray.init takes it (default: %(default)s)"
    )
    group.add_argument(
        "--app-name",
        metavar="NAME",
        default=PROGRAM,
        help="name of the application in Ray Serve (default: %(default)s)",
    )
    group.add_argument(
        "--pipelines",
        metavar="N",
        type=positive_count,
        default=1,
        help="pipelines to run; with --max-pipelines, the fewest (default: %(default)s)",
    )
    group.add_argument(
        "--max-pipelines",
        metavar="N",
        type=positive_count,
        help="let Ray Serve run up to so many, by the number of running requests (default: no autoscaling)",
    )
    group.add_argument(
        "--requests-per-pipeline",
        metavar="N",
        type=positive_count,
        help="running requests and sessions per pipeline that autoscaling aims at (default: those that the "
        "pipeline computes at a time, by the stage config)",
    )
    group.add_argument(
        "--cpus-per-pipeline",
        metavar="N",
        type=positive_count,
        help="CPUs that Ray reserves for a pipeline (default: one for the server and one for each engine)",
    )
    add_serve_flags(parser, RAY_API)


def checked(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace
) -> tuple[ServeOptions, RayOptions, StageConfig]:
    """Returns the options and the stage config. Raises `ConfigError`, and calls `parser.error` for wrong
    flags."""
    options, ray_options = serve_options(parser, parsed), options_of(RayOptions, parsed)
    refuse_web_server_flags(options)
    if options.stage_config is None:
        raise ConfigError("a deployment needs --stage-config: it says which GPUs a pipeline takes")
    if ray_options.max_pipelines is None and ray_options.requests_per_pipeline is not None:
        raise ConfigError("--requests-per-pipeline needs --max-pipelines")
    if ray_options.max_pipelines is not None and ray_options.max_pipelines < ray_options.pipelines:
        raise ConfigError("--max-pipelines is less than --pipelines")
    config = options.stage_flags.applied(load_stage_config(find_stage_config(options.stage_config)))
    pipeline_needs(config, options.api)
    return options, ray_options, config


class _ConfigParser(Parser):
    """For arguments in a file: an exit would only be seen as a worker of Ray that died."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"arguments of 'ray deploy': {message}")


def deployment_of(arguments: Sequence[str | int]) -> tuple[ServeOptions, RayOptions, StageConfig]:
    """Parses the arguments of `omni-server ray deploy` in a Ray Serve config file, in which YAML reads some
    as numbers. Raises `ConfigError`."""
    words = [str(argument) for argument in arguments]
    if any(word.partition("=")[0] == "--api-key" for word in words):
        raise ConfigError(
            "Ray Serve logs and shows what its config file has: use --api-key-file, not --api-key"
        )
    parser = _ConfigParser(prog=f"{PROGRAM} ray deploy", allow_abbrev=False)
    fill_deploy(parser)
    return checked(parser, parser.parse_args(words))
