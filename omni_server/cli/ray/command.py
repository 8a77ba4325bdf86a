"""`omni-server ray deploy`: runs whole pipelines on the machines of a Ray cluster, as replicas of a Ray Serve
application."""

import argparse
import logging

from omni_server.cli.ray.flags import checked, fill_deploy
from omni_server.cli.ray.options import RayOptions
from omni_server.cli.serve_flags import ServeOptions
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError, OmniError
from omni_server.platform.log_format import set_up_logging

logger = logging.getLogger(__name__)


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run pipelines on the machines of a Ray cluster."
    parser.epilog = "Needs the extra ray. docs/scaling.md explains when to use it."
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    deploy = actions.add_parser(
        "deploy",
        help="run whole pipelines as replicas in Ray Serve",
        description="Run whole pipelines as replicas in Ray Serve. Returns when they are ready; they run until "
        "'serve shutdown'. Deploying again replaces them one after the other.",
        epilog="Takes the flags of 'omni-server serve', except those of its web server: --uds, --root-path, "
        "--ssl-*, --max-header-*, --max-url-size, --header-timeout, --send-timeout and --uvicorn-log-level. "
        "MODEL and other paths are those of the machine where a pipeline runs; the stage config and keys are "
        "read here.",
        allow_abbrev=False,
    )
    fill_deploy(deploy)
    deploy.set_defaults(run=lambda options: _deploy(*checked(deploy, options)))


def _deploy(options: ServeOptions, ray_options: RayOptions, config: StageConfig) -> int:
    set_up_logging(options.log_level, options.log_format)
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ConfigError("Ray is not installed here: install omni-server[ray]") from error
    from omni_server.cli.ray.pipeline import bound

    try:
        ray.init(address=ray_options.address, log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(f"no Ray cluster at {ray_options.address}: {error}") from error
    # Of a Serve that runs already, these options stay as they are.
    serve.start(http_options={"host": options.api.host, "port": options.api.port})
    try:
        serve.run(bound(options, ray_options, config), name=ray_options.app_name)
    except RuntimeError as error:
        raise OmniError(str(error)) from error
    print(
        f"Ready. The proxies of Ray Serve answer on port {options.api.port} of each machine with a pipeline, "
        "unless Serve was running before with another one.\n'serve status' shows the pipelines, 'serve "
        "shutdown' ends them."
    )
    return 0
