"""How many pipelines Ray Serve runs, and what it is told about each."""

from dataclasses import dataclass, replace

from omni_server.api.config import ApiConfig
from omni_server.cli.serve_flags import ServeOptions, flag_of
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError

RAY_API = replace(ApiConfig(), host="0.0.0.0", max_audio_ahead_s=10.0)
"""Defaults in Ray. There is a proxy on each machine, and it takes everything that a pipeline sends, whether
the client reads it or not."""

IS_READY = "is_ready"
"""What a pipeline tells the router about itself: whether all its stages are up."""

_OF_THE_WEB_SERVER = ("uds", "root_path", "tls", "header_timeout_s", "http_send_timeout_s", "log_level")
"""Fields of `ApiConfig` that say what the web server of `omni-server serve` does."""

_ROOM_FOR_PROBES = 64
_NO_LIMIT = 1_000_000
_TIME_TO_END_S = 15.0
"""For the engines, after the last request."""


@dataclass(frozen=True)
class RayOptions:
    """The flags of `omni-server ray deploy` beside those of `serve`."""

    address: str
    """As `ray.init` takes it."""
    app_name: str
    pipelines: int
    """The fewest of them, with `max_pipelines`."""
    max_pipelines: int | None
    """None runs exactly `pipelines`."""
    requests_per_pipeline: int | None
    """Mean number of running requests per pipeline above which Ray Serve adds one; None is
    `concurrent_requests`."""
    cpus_per_pipeline: int | None
    """None is one for the server and one for each engine."""


@dataclass(frozen=True)
class PipelineNeeds:
    """One replica of the Ray Serve deployment. All of its resources are on one machine, because it is one
    actor; its engines are child processes of that actor."""

    num_gpus: int
    num_cpus: int
    max_ongoing_requests: int
    """More than the server takes, so that it is the server that refuses requests, as it does elsewhere. A
    WebSocket counts for as long as it is open."""
    max_queued_requests: int
    """Requests that each proxy holds while no pipeline is up; more get 503."""
    graceful_shutdown_timeout_s: float


def pipeline_needs(config: StageConfig, api: ApiConfig, num_cpus: int | None = None) -> PipelineNeeds:
    """Raises `ConfigError` for GPUs that are not numbered from 0 without a gap: Ray chooses the real ones."""
    num_gpus = 0
    if config.platform == "cuda":
        devices = {device for stage in config.stages.values() for device in stage.devices}
        num_gpus = len(devices)
        if devices != set(range(num_gpus)):
            raise ConfigError(
                f"the stage config uses the GPUs {', '.join(map(str, sorted(devices)))}: Ray chooses the GPUs "
                f"of a pipeline and numbers them from 0, so name 0 to {num_gpus - 1}"
            )
    num_engines = sum(stage.replicas * stage.num_ranks for stage in config.stages.values())
    max_queue = api.max_queue or _NO_LIMIT
    return PipelineNeeds(
        num_gpus=num_gpus,
        num_cpus=1 + num_engines if num_cpus is None else num_cpus,
        max_ongoing_requests=max_queue + _ROOM_FOR_PROBES,
        max_queued_requests=max_queue,
        graceful_shutdown_timeout_s=api.shutdown_timeout_s + _TIME_TO_END_S,
    )


def concurrent_requests(config: StageConfig) -> int:
    """Spoken requests that a pipeline computes at the same time: the batch of its narrowest stage."""
    return min(stage.max_num_seqs * stage.replicas for stage in config.stages.values())


def refuse_web_server_flags(options: ServeOptions) -> None:
    """Raises `ConfigError` for a flag that nothing would honour."""
    default = vars(RAY_API)
    flags = [flag_of(name) for name in _OF_THE_WEB_SERVER if vars(options.api)[name] != default[name]]
    if flags:
        raise ConfigError(
            f"{flags[0]} configures the web server of 'omni-server serve', which does not run here: the "
            "proxies of Ray Serve receive the requests"
        )
