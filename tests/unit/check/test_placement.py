"""Stage configs for GPUs of many sizes, one and two of them; no GPU is looked at."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from omni_server.check.default_config import default_stage_config
from omni_server.check.files import StoredWeights
from omni_server.check.machine import Gpu
from omni_server.check.memory import CAPTURE_SIZE, ModelSizes, check_gpu_memory, stage_memory
from omni_server.check.placement import Quantization, plan
from omni_server.check.report import Report
from omni_server.config.checkpoint_files import StoredTensor
from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stage_config import MAX_MEMORY_FRACTION, StageConfig
from omni_server.config.stages import ArStage
from omni_server.errors import ConfigError
from omni_server.family.footprint import StageFootprint
from stages.qwen2_5_omni.footprint import stage_footprints
from tests.checkpoints.qwen2_5_omni.genuine import genuine_model_config

GIB = 2**30
BASE = load_stage_config(find_shipped_config("qwen2_5_omni"))
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "modules_to_not_convert": ["visual"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
MODELS: dict[str, tuple[str, dict[str, object] | None, Quantization | None]] = {
    "7b": ("7b", None, None),
    "7b fp8": ("7b", None, "fp8"),
    "7b awq": ("7b", AWQ, None),
    "7b gptq": ("7b", GPTQ, "gptq"),
    "3b": ("3b", None, None),
}
SIZES = (16, 23.6, 24, 32, 40, 48, 80, 141)
"""GiB. Of a card with 24 GiB, torch sees 23.6 or so."""
NOTHING = None
TUNED = (32768, 64)
# Context and requests at once, by model and size; the 80 GB and more are the shipped config's own.
ONE_GPU: dict[str, tuple[tuple[int, int] | None, ...]] = {
    "7b": (NOTHING, NOTHING, NOTHING, (16384, 8), (32768, 32), TUNED, TUNED, TUNED),
    "7b fp8": (NOTHING, (4096, 4), (8192, 4), (32768, 32), TUNED, TUNED, TUNED, TUNED),
    "7b awq": (NOTHING, (16384, 8), (16384, 8), (32768, 32), TUNED, TUNED, TUNED, TUNED),
    "7b gptq": (NOTHING, (16384, 8), (16384, 8), (32768, 32), TUNED, TUNED, TUNED, TUNED),
    "3b": (NOTHING, (32768, 32), (32768, 32), TUNED, TUNED, TUNED, TUNED, TUNED),
}
TWO_GPUS: dict[str, tuple[tuple[int, int] | None, ...]] = {
    "7b": (NOTHING, (32768, 16), (32768, 16), TUNED, TUNED, TUNED, TUNED, TUNED),
    "7b fp8": ((16384, 8), TUNED, TUNED, TUNED, TUNED, TUNED, TUNED, TUNED),
    "7b awq": ((32768, 32), TUNED, TUNED, TUNED, TUNED, TUNED, TUNED, TUNED),
    "7b gptq": ((32768, 32), TUNED, TUNED, TUNED, TUNED, TUNED, TUNED, TUNED),
    "3b": ((32768, 32), TUNED, TUNED, TUNED, TUNED, TUNED, TUNED, TUNED),
}
OUTCOMES = [
    pytest.param(model, number, size, expected, id=f"{model} on {number} x {size}")
    for number, table in ((1, ONE_GPU), (2, TWO_GPUS))
    for model, row in table.items()
    for size, expected in zip(SIZES, row, strict=True)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, ModelSizes]:
    found: dict[str, dict[str, StageFootprint]] = {}
    for name, (size, quantization, _) in MODELS.items():
        if quantization is None and size in found:
            found[name] = found[size]
            continue
        folder = tmp_path_factory.mktemp("model")
        config = genuine_model_config(size) | ({"quantization_config": quantization} if quantization else {})
        (folder / "config.json").write_text(json.dumps(config))
        found[name] = stage_footprints(folder, BASE)
    return {name: ModelSizes(name, footprints, StoredWeights()) for name, footprints in found.items()}


def gpus(number: int, gib: float) -> list[Gpu]:
    return [Gpu(index, "A GPU", int(gib * GIB), None, (9, 0)) for index in range(number)]


def planned(models: Mapping[str, ModelSizes], model: str, devices: list[Gpu]) -> StageConfig | None:
    try:
        return plan(devices, BASE, models[model], MODELS[model][2])
    except ConfigError:
        return None


def size_of(config: StageConfig | None) -> tuple[int, int] | None:
    return (
        None
        if config is None
        else (config.stages["thinker"].max_model_len, config.stages["thinker"].max_num_seqs)
    )


@pytest.mark.parametrize(("model", "number", "gib", "expected"), OUTCOMES)
def test_the_plan_fits_its_gpus(
    model: str, number: int, gib: float, expected: tuple[int, int] | None, models: Mapping[str, ModelSizes]
) -> None:
    devices = gpus(number, gib)
    config = planned(models, model, devices)
    assert size_of(config) == expected
    if config is None:
        return
    sums: dict[int, float] = defaultdict(float)
    for stage in config.stages.values():
        (device,) = stage.devices
        sums[device] += stage.gpu_memory_utilization
    assert max(sums.values()) <= MAX_MEMORY_FRACTION
    report = Report(model)
    check_gpu_memory(config, models[model], devices, report)
    assert report.findings == []
    assert StageConfig.model_validate(config.model_dump(by_alias=True)) == config


@pytest.mark.parametrize("gib", [79.1, 80, 141])
def test_on_80_gb_and_more_the_shipped_config_stays_as_it_is(
    models: Mapping[str, ModelSizes], gib: float
) -> None:
    for number in (1, 2):
        assert planned(models, "7b", gpus(number, gib)) == BASE


def test_two_gpus_are_used_where_one_has_no_room_for_as_much(models: Mapping[str, ModelSizes]) -> None:
    for gib, devices in ((24, {0, 1}), (40, {0, 1}), (48, {0}), (80, {0})):
        config = planned(models, "7b", gpus(2, gib))
        assert config is not None
        assert {device for stage in config.stages.values() for device in stage.devices} == devices
        assert config.stages["talker"].devices == config.stages["code2wav"].devices


def test_the_thinker_is_on_the_larger_gpu(models: Mapping[str, ModelSizes]) -> None:
    config = planned(models, "7b", [gpus(1, 16)[0], gpus(2, 24)[1]])
    assert config is not None
    assert [stage.devices for stage in config.stages.values()] == [(1,), (0,), (0,)]


def test_what_other_programs_use_is_not_planned_with(models: Mapping[str, ModelSizes]) -> None:
    total = 80 * GIB
    config = plan([Gpu(0, "A GPU", total, 40 * GIB, (9, 0))], BASE, models["7b"], None)
    assert sum(stage.gpu_memory_utilization for stage in config.stages.values()) * total <= 40 * GIB
    assert size_of(config) == (32768, 32)


def test_everything_else_is_as_the_shipped_config_has_it(models: Mapping[str, ModelSizes]) -> None:
    config = planned(models, "7b fp8", gpus(1, 24))
    assert config is not None
    chosen = {
        "devices", "gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_streams",
    }  # fmt: skip
    for name, stage in config.stages.items():
        changed = {
            field
            for field in type(stage).model_fields
            if vars(stage)[field] != vars(BASE.stages[name])[field]
        }
        added = set(stage.engine_args) - set(BASE.stages[name].engine_args)
        assert changed - chosen == ({"engine_args"} if isinstance(stage, ArStage) else set())
        assert added == ({"quantization", "quantization_config"} if name == "thinker" else set())
        kept = {key: value for key, value in stage.engine_args.items() if key not in {*added, CAPTURE_SIZE}}
        assert kept == {
            key: value for key, value in BASE.stages[name].engine_args.items() if key != CAPTURE_SIZE
        }
    assert config.edges == BASE.edges


def test_a_model_that_does_not_fit_is_refused_in_one_line_with_what_would(
    models: Mapping[str, ModelSizes],
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(gpus(1, 24), BASE, models["7b"], None)
    assert str(caught.value) == (
        "7b does not fit: device 0 has 25.8 GB, 24.5 GB of them for stages. What would fit: --quantization fp8, a "
        "checkpoint of it in 4 bits (AWQ or GPTQ), one GPU with 32 GB, two with 23 GB each, or a smaller model"
    )
    with pytest.raises(ConfigError) as caught:
        plan(gpus(1, 16), BASE, models["7b awq"], None)
    assert str(caught.value) == (
        "7b awq does not fit: device 0 has 17.2 GB, 16.3 GB of them for stages. What would fit: one GPU with 22 GB, "
        "two with 13 GB each, or a smaller model"
    )


@pytest.mark.parametrize(("model", "number"), [(model, number) for model in MODELS for number in (1, 2)])
def test_what_a_refusal_says_would_fit_does_fit(
    model: str, number: int, models: Mapping[str, ModelSizes]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(gpus(1, 8), BASE, models[model], MODELS[model][2])
    word = {1: "one GPU with ", 2: "two with "}[number]
    gigabytes = int(str(caught.value).partition(word)[2].partition(" ")[0])
    assert planned(models, model, gpus(number, (gigabytes + 0.1) * 1e9 / GIB)) is not None
    assert planned(models, model, gpus(number, (gigabytes - 1.1) * 1e9 / GIB)) is None


@pytest.mark.parametrize(
    ("model", "quantization", "message"),
    [
        ("7b awq", "fp8", "--quantization fp8: the weights of 7b awq are quantized already, with awq"),
        ("7b awq", "gptq", "--quantization gptq: the weights of 7b awq are quantized already, with awq"),
        ("7b", "awq", "--quantization awq: 7b names no quantization_config in its config.json"),
    ],
)
def test_a_precision_that_the_checkpoint_cannot_have_is_refused(
    model: str, quantization: Quantization, message: str, models: Mapping[str, ModelSizes]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(gpus(1, 80), BASE, models[model], quantization)
    assert message in str(caught.value)


def test_a_larger_gpu_without_bfloat16_is_passed_over(models: Mapping[str, ModelSizes]) -> None:
    old, new = (
        Gpu(0, "Old", 32 * GIB, None, (7, 0)),
        Gpu(1, "New", 24 * GIB, None, (8, 6)),
    )
    config = plan([old, new], BASE, models["3b"], None)
    assert {stage.devices for stage in config.stages.values()} == {(1,)}


def test_a_gpu_without_bfloat16_is_refused(models: Mapping[str, ModelSizes]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^stages\.thinker\.dtype is bfloat16, which A GPU \(compute capability 7\.5\) does not",
    ):
        plan([Gpu(0, "A GPU", 80 * GIB, None, (7, 5))], BASE, models["7b"], None)


def test_a_model_of_a_family_without_a_shipped_config_needs_one_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["ToySpeaker"]}')
    with pytest.raises(ConfigError) as caught:
        default_stage_config(tmp_path, "my/toy", use_cpu=True)
    assert str(caught.value) == (
        "my/toy (ToySpeaker) needs a stage config, and none is shipped for it: give one with --stage-config"
    )


def test_weights_that_a_quantized_checkpoint_keeps_in_16_bits_count_as_stored(
    models: Mapping[str, ModelSizes],
) -> None:
    footprint = models["7b"].footprints["thinker"]
    assert footprint.quantizable is not None
    in_fp8 = replace(footprint, quantizable=replace(footprint.quantizable, method="fp8", bits=8))
    kept = {
        name: StoredTensor(Path("model.safetensors"), "BF16", shape)
        for name, shape in footprint.tensors.items()
        if name in footprint.quantizable.weights and name.endswith("down_proj.weight")
    }

    def weights(stored: StoredWeights) -> int:
        sizes = ModelSizes("7b", {"thinker": in_fp8}, stored)
        return stage_memory("thinker", BASE, sizes, 80 * GIB).weights

    more = sum(math.prod(tensor.shape) for tensor in kept.values())
    assert more > 1e9
    assert weights(StoredWeights(kept)) - weights(StoredWeights()) == more
