"""`omni-server ray deploy` up to the point where Ray is needed: flags, and what Ray Serve is told."""

import builtins

import pytest

from omni_server.api.config import ApiConfig
from omni_server.cli.main import main
from omni_server.cli.ray.flags import deployment_of
from omni_server.cli.ray.options import concurrent_requests, pipeline_needs
from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError

COMMAND = ["some/model", "--stage-config", "qwen2_5_omni.demo-cpu"]


def config_of(name: str) -> StageConfig:
    return load_stage_config(find_shipped_config(name))


@pytest.mark.parametrize(
    ("name", "num_gpus", "num_cpus"),
    [
        ("qwen2_5_omni", 1, 4),
        ("qwen2_5_omni.2gpu", 2, 7),
        ("qwen3_omni.4gpu", 4, 6),
        ("qwen2_5_omni.demo-cpu", 0, 4),
    ],
)
def test_a_pipeline_takes_the_gpus_of_its_stage_config_and_a_cpu_per_process(
    name: str, num_gpus: int, num_cpus: int
) -> None:
    needs = pipeline_needs(config_of(name), ApiConfig())

    assert (needs.num_gpus, needs.num_cpus) == (num_gpus, num_cpus)


def test_gpus_with_a_gap_are_refused() -> None:
    document = config_of("qwen2_5_omni").model_dump(by_alias=True)
    for stage in document["stages"].values():
        stage["devices"] = [2]
    config = StageConfig.model_validate(document)

    with pytest.raises(ConfigError, match="uses the GPUs 2: Ray chooses the GPUs"):
        pipeline_needs(config, ApiConfig())


@pytest.mark.parametrize("max_queue", [1, 1024, 0])
def test_the_server_refuses_requests_before_ray_makes_them_wait(max_queue: int) -> None:
    """Ray Serve's default is 5, and a WebSocket takes a place for as long as it is open."""
    needs = pipeline_needs(config_of("qwen2_5_omni"), ApiConfig(max_queue=max_queue))

    assert needs.max_ongoing_requests > (max_queue or 100_000)
    assert needs.max_queued_requests > 0


def test_running_requests_may_finish_before_a_pipeline_is_killed() -> None:
    needs = pipeline_needs(config_of("qwen2_5_omni"), ApiConfig(shutdown_timeout_s=100))

    assert needs.graceful_shutdown_timeout_s > 100


def test_autoscaling_aims_at_what_the_narrowest_stage_computes_at_a_time() -> None:
    document = config_of("qwen2_5_omni.4gpu").model_dump(by_alias=True)
    document["stages"]["talker"] |= {"max_num_seqs": 48}
    document["stages"]["code2wav"] |= {"max_num_seqs": 16}
    config = StageConfig.model_validate(document)

    assert (config.stages["talker"].replicas, config.stages["code2wav"].replicas) == (4, 4)
    assert concurrent_requests(config) == 64


@pytest.mark.parametrize("words", [["--api-key", "secret"], ["--api-key=secret"]])
def test_a_key_is_no_argument_in_a_config_file(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="use --api-key-file") as caught:
        deployment_of([*COMMAND, *words])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("words", [["--max-quue", "7"], ["--max-queue", "many"]])
def test_a_wrong_argument_in_a_config_file_is_an_error_that_ray_shows(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"arguments of 'ray deploy': .*--max-qu"):
        deployment_of([*COMMAND, *words])


def test_audio_is_sent_close_to_playback_unless_another_limit_is_given() -> None:
    """The proxies of Ray Serve take everything at once."""
    assert deployment_of(COMMAND)[0].api.max_audio_ahead_s == 10
    assert deployment_of([*COMMAND, "--max-audio-ahead", "3"])[0].api.max_audio_ahead_s == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--uds", "/run/omni"], "--uds configures the web server of 'omni-server serve'"),
        (["--root-path", "/omni"], "--root-path configures"),
        (["--ssl-certfile", "cert.pem"], "--ssl-certfile configures"),
        (["--header-timeout", "5"], "--header-timeout configures"),
        (["--send-timeout", "5"], "--send-timeout configures"),
        (["--uvicorn-log-level", "debug"], "--uvicorn-log-level configures"),
        (["--pipelines", "3", "--max-pipelines", "2"], "--max-pipelines is less than --pipelines"),
        (["--requests-per-pipeline", "3"], "--requests-per-pipeline needs --max-pipelines"),
    ],
)
def test_what_nothing_would_honour_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ray", "deploy", *COMMAND, *flags]) == 2
    assert capsys.readouterr().err.startswith(f"omni-server: error: {message}")


def test_a_deployment_needs_a_stage_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ray", "deploy", "some/model"]) == 2
    assert "needs --stage-config: it says which GPUs a pipeline takes" in capsys.readouterr().err


def test_without_ray_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real_import = builtins.__import__

    def without_ray(name: str, *arguments: object, **options: object) -> object:
        if name == "ray":
            raise ImportError(name)
        return real_import(name, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_ray)

    assert main(["ray", "deploy", *COMMAND]) == 2
    assert capsys.readouterr().err.endswith("Ray is not installed here: install omni-server[ray]\n")
