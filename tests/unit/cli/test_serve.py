"""`omni-server serve` up to the point where engines would start."""

import json
import os
import ssl
from pathlib import Path

import pytest

from omni_server.api.config import ApiConfig, CorsRules, TlsFiles
from omni_server.check import default_config
from omni_server.check.machine import Gpu
from omni_server.check.report import DeviceMemory
from omni_server.check.stage_flags import StageFlags
from omni_server.cli import pipeline, serve
from omni_server.cli.main import main
from omni_server.cli.serve_flags import KEY_VARIABLES, ServeOptions
from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError, StageDeadError
from omni_server.media.limits import MediaLimits
from tests.checkpoints.qwen2_5_omni.genuine import genuine_model_config
from tests.checkpoints.write import make_demo_checkpoint


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """Options that `serve` was called with; nothing is started."""
    calls: list[ServeOptions] = []

    def record(options: ServeOptions) -> int:
        calls.append(options)
        return 0

    monkeypatch.setattr(serve, "serve", record)
    return calls


def test_the_defaults(parsed: list[ServeOptions]) -> None:
    assert main(["serve", "some/model"]) == 0

    assert parsed == [
        ServeOptions(
            model="some/model",
            stage_config=None,
            use_cpu=False,
            served_model_names=("some/model",),
            revision=None,
            load_format="auto",
            request_timeout_s=None,
            log_level="info",
            log_format="text",
            api=ApiConfig(host="127.0.0.1", port=8091),
        )
    ]


def test_every_flag_reaches_its_place(parsed: list[ServeOptions]) -> None:
    flags = (
        "--quantization fp8 --max-model-len 8192 --tensor-parallel-size 2 --gpu-memory-utilization 0.8 "
        "--served-model-name first second --revision v2 --speech-model some/voice "
        "--max-speech-characters 10000 "
        "--load-format dummy --host 0.0.0.0 "
        "--port 9000 --max-body-size 64M --allowed-media-domains a.example b.example --request-timeout 90 "
        "--shutdown-timeout 0 --disable-fastapi-docs --log-level debug --uvicorn-log-level warning "
        "--disable-uvicorn-access-log --chat-text-in-content --log-format json --root-path /omni/ "
        "--api-key one two --api-key three "
        "--metrics-need-key --no-public-voice-list --allowed-origins https://a.example https://b.example "
        '--allowed-methods ["GET","POST"] --allowed-headers authorization --allow-credentials '
        "--ssl-certfile cert.pem --ssl-keyfile key.pem --ssl-ca-certs ca.pem --ssl-cert-reqs 2 "
        "--ssl-ciphers ECDHE --max-queue 9 --max-concurrency-per-key 3 --body-timeout 7 "
        "--max-total-body-size 2G --send-timeout 8 --max-unsent-size 8M --max-total-unsent-size 64M "
        "--allowed-local-media-path /srv/media --max-media-size 1M --max-audio-duration 30 "
        "--max-video-duration 20 --max-image-pixels 1000 --max-video-frame-pixels 500 --media-fetch-timeout "
        "4 --media-decode-timeout 6 --max-upload-size 2M --max-upload-duration 40 "
        "--max-output-pixels 65536 --max-image-steps 30 --realtime-max-sessions 3 "
        "--realtime-session-timeout 50 --realtime-idle-timeout 12 --otlp-traces-endpoint "
        "http://collector:4318/v1/traces"
    )

    assert main(["serve", "some/model", *flags.split()]) == 0

    assert parsed == [
        ServeOptions(
            model="some/model",
            speech_model="some/voice",
            stage_flags=StageFlags("fp8", 8192, 2, 0.8),
            served_model_names=("first", "second"),
            revision="v2",
            load_format="dummy",
            request_timeout_s=90.0,
            log_level="debug",
            log_format="json",
            api=ApiConfig(
                host="0.0.0.0",
                port=9000,
                root_path="/omni",
                tls=TlsFiles("cert.pem", "key.pem", "ca.pem", ssl.CERT_REQUIRED, "ECDHE"),
                api_keys=("one", "two", "three"),
                metrics_need_key=True,
                public_voice_lists=False,
                cors=CorsRules(
                    ("https://a.example", "https://b.example"),
                    ("GET", "POST"),
                    ("authorization",),
                    allow_credentials=True,
                ),
                max_queue=9,
                max_speech_characters=10000,
                max_concurrency_per_key=3,
                max_body_bytes=64 * 1024 * 1024,
                body_timeout_s=7.0,
                max_total_body_bytes=2 * 1024**3,
                max_unsent_bytes=8 * 1024 * 1024,
                max_total_unsent_bytes=64 * 1024 * 1024,
                http_send_timeout_s=8.0,
                allowed_media_domains=("a.example", "b.example"),
                allowed_local_media_path=Path("/srv/media"),
                media_limits=MediaLimits(
                    max_bytes=1024 * 1024,
                    max_audio_seconds=30.0,
                    max_video_seconds=20.0,
                    max_image_pixels=1000,
                    max_video_frame_pixels=500,
                    fetch_timeout_s=4.0,
                ),
                media_decode_timeout_s=6.0,
                max_upload_bytes=2 * 1024**2,
                max_upload_seconds=40.0,
                max_output_pixels=65536,
                max_image_steps=30,
                realtime_max_sessions=3,
                realtime_session_timeout_s=50.0,
                realtime_idle_timeout_s=12.0,
                shutdown_timeout_s=0.0,
                log_level="warning",
                access_log=False,
                docs=False,
                chat_text_in_content=True,
                otlp_traces_endpoint="http://collector:4318/v1/traces",
            ),
        )
    ]


def test_stage_config_and_cpu_reach_their_place(parsed: list[ServeOptions]) -> None:
    assert main(["serve", "some/model", "--stage-config", "mine.yaml", "--cpu"]) == 0

    assert (parsed[0].stage_config, parsed[0].use_cpu) == ("mine.yaml", True)


def test_the_model_may_be_a_flag(parsed: list[ServeOptions]) -> None:
    assert main(["serve", "--model", "some/model", "--uds", "/run/omni.sock"]) == 0

    assert (parsed[0].model, parsed[0].api.uds) == ("some/model", "/run/omni.sock")


@pytest.mark.parametrize("flags", [[], ["--demo"]])
def test_without_a_model_the_demo_is_served(parsed: list[ServeOptions], flags: list[str]) -> None:
    assert main(["serve", *flags]) == 0

    (options,) = parsed
    assert (options.model, options.served_model_names) == (None, ("speaking-demo",))


def test_the_demo_comes_with_the_package(
    no_start: list[StageConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["serve"]) == 0
    assert no_start == [load_stage_config(find_shipped_config("qwen2_5_omni.demo-cpu"))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a --demo", "MODEL and --demo contradict each other: give one of them"),
        ("--demo a", "MODEL and --demo contradict each other: give one of them"),
        ("a --model b", "MODEL is given twice: as an argument and with --model"),
        ("--model=", "MODEL is empty"),
        ("--revision main", "--revision needs a MODEL"),
        ("a --port 65536", "argument --port: '65536' is not a port: 0 to 65535"),
        ("a --port=-1", "argument --port: '-1' is not a port: 0 to 65535"),
        (
            "a --max-body-size 0",
            "argument --max-body-size: '0' is not a size: a number of bytes, or as in 512K, 64M, 1G",
        ),
        (
            "a --max-body-size 5T",
            "argument --max-body-size: '5T' is not a size: a number of bytes, or as in 512K, 64M, 1G",
        ),
        ("a --max-queue=-1", "argument --max-queue: '-1' is not a whole number of 0 or more"),
        ("a --max-image-pixels 0", "argument --max-image-pixels: must be 1 or more"),
        ("a --max-model-len 0", "argument --max-model-len: must be 1 or more"),
        ("a --tensor-parallel-size 0", "argument --tensor-parallel-size: must be 1 or more"),
        *(
            (
                f"a --gpu-memory-utilization {share}",
                f"argument --gpu-memory-utilization: '{share}' is not more than 0 and at most 0.95",
            )
            for share in ("0", "0.96", "90", "nan", "high")
        ),
        ("a --request-timeout 0", "argument --request-timeout: must be more than 0 seconds"),
        ("a --request-timeout nan", "argument --request-timeout: 'nan' is not a number of seconds"),
        ("a --shutdown-timeout=-1", "argument --shutdown-timeout: '-1' is not a number of seconds"),
    ],
)
def test_wrong_flags_exit_with_2_and_a_reason(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *arguments.split()])

    assert caught.value.code == 2
    reason, help_command = capsys.readouterr().err.splitlines()
    assert reason == f"omni-server serve: error: {message}"
    assert help_command.endswith(" serve --help")


@pytest.mark.parametrize(("text", "num_bytes"), [("512", 512), ("2k", 2048), ("2KiB", 2048), ("1gb", 2**30)])
def test_sizes_may_have_units(parsed: list[ServeOptions], text: str, num_bytes: int) -> None:
    assert main(["serve", "some/model", "--max-body-size", text]) == 0

    assert parsed[0].api.max_body_bytes == num_bytes


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_keys_of_flags_and_file_count_together(parsed: list[ServeOptions], tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("two\nthree\n")

    assert main(["serve", "some/model", "--api-key", "one", "--api-key-file", str(path)]) == 0

    assert parsed[0].api.api_keys == ("one", "two", "three")


@pytest.mark.parametrize(
    ("environment", "flags", "keys"),
    [
        ({"VLLM_API_KEY": "v"}, [], ("v",)),
        ({"VLLM_API_KEY": "v", "OMNI_SERVER_API_KEY": "o"}, [], ("o",)),
        ({"VLLM_API_KEY": "v", "OMNI_SERVER_API_KEY": ""}, [], ("v",)),
        ({"VLLM_API_KEY": ""}, [], ()),
        ({"VLLM_API_KEY": "v"}, ["--api-key", "f"], ("f",)),
    ],
)
def test_a_key_may_come_from_the_environment(
    environment: dict[str, str],
    flags: list[str],
    keys: tuple[str, ...],
    parsed: list[ServeOptions],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert main(["serve", "some/model", *flags]) == 0

    assert parsed[0].api.api_keys == keys


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ssl-keyfile key.pem", "TLS needs --ssl-certfile"),
        (
            "--max-body-size 2G",
            "--max-total-body-size is less than --max-body-size: the largest body would never be taken",
        ),
        ("--ssl-certfile c.pem --ssl-cert-reqs 2", "--ssl-cert-reqs needs --ssl-ca-certs"),
        ("--cpu --gpu-memory-utilization 0.5", "--gpu-memory-utilization needs an NVIDIA GPU"),
        ("--max-concurrency-per-key 2", "--max-concurrency-per-key needs --api-key"),
        ("--root-path omni", "--root-path 'omni' must begin with a slash"),
        ('--allowed-origins ["a"', "--allowed-origins: '[\"a\"' is not a JSON list of strings"),
        ("--allowed-origins [1]", "--allowed-origins: '[1]' is not a JSON list of strings"),
    ],
)
def test_flags_that_do_not_fit_together_exit_with_2(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "some/model", *flags.split()]) == 2

    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "is_warned"),
    [
        ("--host 0.0.0.0", True),
        ("--host ::", True),
        ("--host some.host", True),
        ("", False),
        ("--host localhost", False),
        ("--host ::1", False),
        ("--host 0.0.0.0 --api-key k", False),
        ("--uds /run/omni.sock --host 0.0.0.0", False),
    ],
)
def test_server_that_is_open_to_others_says_so(
    flags: str, is_warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    main(["serve", str(tmp_path / "none"), "--stage-config", "qwen2_5_omni.demo-cpu", *flags.split()])

    assert ("no --api-key is set" in caplog.text) == is_warned


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> list[StageConfig]:
    """Configs that engines would have been started with, in an environment that stays as it is."""
    monkeypatch.setattr(default_config, "set_library_environment", lambda: None)
    monkeypatch.setattr(default_config, "set_engine_environment", lambda config: None)
    configs: list[StageConfig] = []

    def record(options: ServeOptions, model_dir: Path, config: StageConfig, *_: object) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(serve, "_run", record)
    monkeypatch.setattr(default_config, "refuse_damaged_files", lambda *_, **__: None)
    return configs


@pytest.fixture
def seven_b(tmp_path: Path) -> Path:
    """The 7B as far as a plan looks at it."""
    (tmp_path / "config.json").write_text(json.dumps(genuine_model_config("7b")))
    return tmp_path


def test_torch_finds_the_level_of_its_log_when_it_is_imported(
    seven_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[str | None] = []

    def has_gpu() -> bool:
        """Imports torch."""
        levels.append(os.environ.get("TORCH_CPP_LOG_LEVEL"))
        return False

    monkeypatch.setattr(os, "environ", {"HOME": os.environ["HOME"]})
    monkeypatch.setattr(default_config, "has_gpu", has_gpu)
    assert main(["serve", str(seven_b)]) == 2
    assert levels == ["ERROR"]


def test_without_a_gpu_a_genuine_model_is_refused_in_one_line_before_weights_are_looked_for(
    seven_b: Path,
    no_start: list[StageConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["serve", str(seven_b)]) == 2
    assert capsys.readouterr().err == (
        f"omni-server: error: {seven_b} (10.7 billion parameters) needs an NVIDIA GPU, and torch finds none "
        "here; with --cpu it runs on the processor (stage config qwen2_5_omni.cpu), much slower than "
        "speech\n"
    )
    assert no_start == []


def test_with_cpu_a_genuine_model_runs_with_a_config_made_for_it_and_a_warning(
    seven_b: Path,
    no_start: list[StageConfig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)  # which is not used
    machine = DeviceMemory(None, "memory", 64 * 10**9, 60 * 10**9)
    monkeypatch.setattr(default_config, "memory_of_this_machine", lambda: machine)
    assert main(["serve", str(seven_b), "--cpu", "--load-format", "dummy"]) == 0
    assert no_start == [load_stage_config(find_shipped_config("qwen2_5_omni.cpu"))]
    assert "runs on the processor, which is much slower than speech" in caplog.text


def test_a_cpu_with_too_little_memory_is_refused(
    seven_b: Path,
    no_start: list[StageConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = DeviceMemory(None, "memory", 16 * 10**9, 12 * 10**9)
    monkeypatch.setattr(default_config, "memory_of_this_machine", lambda: machine)
    assert main(["serve", str(seven_b), "--cpu", "--load-format", "dummy"]) == 2
    assert "GB of memory on a CPU, and of 16.0 GB 12.0 GB are free" in capsys.readouterr().err
    assert no_start == []


def test_a_demo_runs_on_a_cpu_with_its_own_config(
    tmp_path: Path,
    no_start: list[StageConfig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    demo = make_demo_checkpoint(tmp_path / "demo", weights="dummy")
    assert main(["serve", str(demo), "--load-format", "dummy"]) == 0
    assert no_start == [load_stage_config(find_shipped_config("qwen2_5_omni.demo-cpu"))]
    assert "slower than speech" not in caplog.text


def test_on_a_gpu_the_config_is_planned_for_it(
    seven_b: Path,
    no_start: list[StageConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpu = Gpu(0, "A GPU", 24 * 2**30, 24 * 2**30, (8, 9))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(default_config, "gpus_of_this_machine", lambda: [gpu])
    assert main(["serve", str(seven_b), "--load-format", "dummy"]) == 2
    assert "What would fit: --quantization fp8" in capsys.readouterr().err
    assert main(["serve", str(seven_b), "--load-format", "dummy", "--quantization", "fp8"]) == 0
    (config,) = no_start
    assert config.stages["thinker"].engine_args["quantization"] == "online"
    assert (
        "stage config made for this machine, platform cuda: thinker (device 0, share 0."
        in capsys.readouterr().out
    )
    assert main(["serve", str(seven_b), "--load-format", "dummy", "--gpu-memory-utilization", "0.5"]) == 2
    assert "device 0 has 25.8 GB, 12.9 GB of them for stages" in capsys.readouterr().err
    gpu = Gpu(0, "A full GPU", 80 * 2**30, 0, (8, 9))
    assert main(["serve", str(seven_b), "--load-format", "dummy", "--gpu-memory-utilization", "0.9"]) == 2
    assert "device 0 has 85.9 GB, 0.0 GB of them for stages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--stage-config qwen2_5_omni --quantization fp8",
            "set engine_args.quantization of the stage in it instead",
        ),
        ("--stage-config qwen2_5_omni --cpu", "platform is cuda, which --cpu contradicts"),
        ("--cpu --quantization fp8", "--quantization fp8 needs an NVIDIA GPU"),
        (
            "--stage-config qwen2_5_omni.demo-cpu --gpu-memory-utilization 0.5",
            "on a CPU, set kv_cache_memory_bytes in the engine_args of each stage",
        ),
        (
            "--stage-config qwen2_5_omni --tensor-parallel-size 2",
            "--tensor-parallel-size 2 needs 2 devices for the thinker, which has [0]: set its 'devices: [0, 1]'",
        ),
        ("--stage-config diffusers --max-model-len 9", "which samples no tokens: set its fields in the file"),
    ],
)
def test_flags_that_contradict_the_stage_config_are_refused(
    flags: str, message: str, seven_b: Path, no_start: list[StageConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(seven_b), "--load-format", "dummy", *flags.split()]) == 2

    assert message in capsys.readouterr().err
    assert no_start == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-key", ""], "an API key is empty"),
        (["--ssl-certfile", ""], "cannot use the TLS certificate or key"),
        (
            ["--ssl-certfile", "/nope"],
            "cannot use the TLS certificate or key /nope: No such file or directory",
        ),
    ],
)
def test_what_cannot_serve_is_refused_before_the_model_is_looked_for(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "prepare", lambda *_: pytest.fail("the model was looked for"))
    assert main(["serve", *flags]) == 2

    assert message in capsys.readouterr().err


def test_a_cuda_config_without_a_gpu_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)

    assert main(["serve", "some/model", "--stage-config", "qwen2_5_omni"]) == 2

    assert capsys.readouterr().err == (
        f"omni-server: error: {find_shipped_config('qwen2_5_omni')}: platform is cuda, but torch finds no "
        "NVIDIA GPU here; choose a config with platform cpu, such as qwen2_5_omni.demo-cpu\n"
    )


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("lower the share"), 2, "omni-server: error: lower the share\n"),
        (
            StageDeadError("talker", "out of memory"),
            1,
            "omni-server: failed: stage 'talker': out of memory\n",
        ),
    ],
)
def test_a_failure_at_start_exits_with_its_code(
    error: Exception,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: ServeOptions) -> int:
        raise error

    monkeypatch.setattr(serve, "serve", fail)

    assert main(["serve", "some/model"]) == code
    assert capsys.readouterr().err == message
