"""Whole pipelines as an application of Ray Serve. Needs the extra `ray`."""

import logging
import os

from ray import serve
from ray.serve.config import RequestRouterConfig

from omni_server.cli.ray.flags import deployment_of
from omni_server.cli.ray.options import RayOptions, concurrent_requests, pipeline_needs
from omni_server.cli.ray.replica import PipelineReplica
from omni_server.cli.ray.router import LessBusyOfTwo
from omni_server.cli.serve_flags import ServeOptions
from omni_server.config.stage_config import StageConfig

logger = logging.getLogger(__name__)

_HEALTH_PERIOD_S = 2.0
"""Ray Serve replaces a replica that fails three times in a row."""

_READY_PERIOD_S = 1.0
"""Between two looks whether a pipeline has all its stages."""


def application(args: dict[str, list[str | int]]) -> serve.Application:
    """Builds the application for a Ray Serve config file. `args` has `arguments`, those of `omni-server ray
    deploy`; Ray Serve itself sets what `--address`, `--app-name`, `--host` and `--port` would.

    Raises `ConfigError`.
    """
    return bound(*deployment_of(args["arguments"]))


def bound(options: ServeOptions, ray_options: RayOptions, stage_config: StageConfig) -> serve.Application:
    """Describes the deployment to Ray Serve."""
    if not options.api.api_keys:
        logger.warning("no key is set: everybody who reaches a proxy of Ray Serve can use the pipelines")
    needs = pipeline_needs(stage_config, options.api, ray_options.cpus_per_pipeline)
    pipeline = serve.deployment(serve.ingress()(PipelineReplica), name="pipeline").options(
        max_ongoing_requests=needs.max_ongoing_requests,
        max_queued_requests=needs.max_queued_requests,
        graceful_shutdown_timeout_s=needs.graceful_shutdown_timeout_s,
        health_check_period_s=_HEALTH_PERIOD_S,
        request_router_config=RequestRouterConfig(
            request_router_class=LessBusyOfTwo, request_routing_stats_period_s=_READY_PERIOD_S
        ),
        ray_actor_options={
            "num_gpus": needs.num_gpus,
            "num_cpus": needs.num_cpus,
            # Ray would set it to `num_cpus`, for each of the engines.
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}},
        },
    )
    if ray_options.max_pipelines is None:
        pipeline = pipeline.options(num_replicas=ray_options.pipelines)
    else:
        target = ray_options.requests_per_pipeline or concurrent_requests(stage_config)
        pipeline = pipeline.options(
            autoscaling_config={
                "min_replicas": ray_options.pipelines,
                "max_replicas": ray_options.max_pipelines,
                "target_ongoing_requests": target,
            }
        )
    return pipeline.bind(options, stage_config)
