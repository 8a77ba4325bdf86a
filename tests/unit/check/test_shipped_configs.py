"""The shipped stage configs on the devices that they are for, as `omni-server check` computes it; and what is
chosen for Qwen3-Omni on other devices."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from omni_server.check.default_config import load_for
from omni_server.check.files import StoredWeights
from omni_server.check.machine import Gpu
from omni_server.check.memory import (
    CAPTURE_SIZE,
    ModelSizes,
    check_cpu_memory,
    check_gpu_memory,
    stage_memory,
)
from omni_server.check.placement import Quantization, plan
from omni_server.check.report import DeviceMemory, Report
from omni_server.config.load import find_shipped_config, load_stage_config, shipped_configs
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import ArStage
from omni_server.errors import ConfigError
from omni_server.family import load_family
from tests.checkpoints.qwen2_5_omni.genuine import genuine_model_config as genuine_qwen2_5
from tests.checkpoints.qwen3_omni.genuine import genuine_model_config as genuine_qwen3
from tests.checkpoints.write import make_demo_checkpoint
from tests.unit.stages.qwen3_tts.checkpoint import write_checkpoint as write_tts

GIB = 2**30
FOUND_80, FOUND_141 = 79.1, 139.8
"""GiB that torch finds on an H100 with 80 GB and an H200 with 141 GB."""
ON_GPUS = {
    "qwen2_5_omni": ("7b", [FOUND_80]),
    "qwen2_5_omni.2gpu": ("7b", [44.4, 44.4]),
    "qwen2_5_omni.4gpu": ("7b", [FOUND_80] * 4),
    "qwen3_omni": ("30b", [FOUND_141]),
    "qwen3_omni.80gb": ("30b", [FOUND_80]),
    "qwen3_omni.2gpu": ("30b", [FOUND_80, FOUND_80]),
    "qwen3_omni.4gpu": ("30b", [FOUND_80] * 4),
    "qwen3_tts": ("tts 1b7", [11.6]),
    "spoken_llm": ("llm 8b", [44.4]),
    "spoken_llm.2gpu": ("llm 8b", [23.6, 23.6]),
    "diffusers": ("qwen-image", [FOUND_80]),
}
"""Model, and GiB of each GPU."""
ON_CPUS = {
    "qwen2_5_omni.cpu": ("7b", 27),
    "qwen2_5_omni.demo-cpu": ("tiny qwen2_5_omni", 4),
    "qwen3_omni.demo-cpu": ("tiny qwen3_omni", 4),
    "qwen3_tts.demo-cpu": ("tiny qwen3_tts", 5),
    "spoken_llm.demo-cpu": ("tiny spoken_llm", 5),
    "diffusers.demo-cpu": ("tiny diffusers", 4),
}
"""Model, and GB of main memory."""
TTS_TALKERS = {
    "tts 0b6": {"hidden_size": 1024, "intermediate_size": 3072},
    "tts 1b7": None,
}
"""What differs from 1.7B."""
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}
LLMS = {
    "llm 4b": {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "llm 8b": {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}
"""What is not in `QWEN3` of Qwen3-4B and Qwen3-8B."""

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Of models, with what footprints are computed from."""

    def folder(model: str) -> Path:
        path = tmp_path_factory.mktemp("model")
        if model.startswith("tiny "):
            family = model.removeprefix("tiny ")
            kind = "base" if family == "qwen3_tts" else None
            return make_demo_checkpoint(path / "tiny", family=family, pipeline=kind, weights="dummy")
        if model == "qwen-image":
            return make_demo_checkpoint(path / "pipeline", family="diffusers", size=model, weights="dummy")
        if model.startswith("tts "):
            return write_tts(path, talker=TTS_TALKERS[model])
        if model.startswith("llm "):
            for part in ("llm", "speech"):
                (path / part).mkdir()
            (path / "llm" / "config.json").write_text(json.dumps(QWEN3 | LLMS[model]))
            write_tts(path / "speech")
            return path
        config = genuine_qwen3() if model == "30b" else genuine_qwen2_5(model)
        (path / "config.json").write_text(json.dumps(config))
        return path

    return folder


def sizes_of(config: StageConfig, folder: Path) -> ModelSizes:
    return ModelSizes("30b", load_family(config.model_family).footprints(folder, config), StoredWeights())


def gpus(sizes: list[float]) -> list[Gpu]:
    return [Gpu(i, "A GPU", int(gib * GIB), int(gib * GIB), (9, 0)) for i, gib in enumerate(sizes)]


def test_every_shipped_config_for_certain_models_is_computed_here() -> None:
    assert shipped_configs().keys() == ON_GPUS.keys() | ON_CPUS.keys()


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_shipped_config_fits_its_gpus(name: str, folders: Folders) -> None:
    model, sizes = ON_GPUS[name]
    config = load_stage_config(find_shipped_config(name))
    report = Report(model)
    check_gpu_memory(config, sizes_of(config, folders(model)), gpus(sizes), report)
    assert report.findings == []
    assert {device for stage in config.stages.values() for device in stage.devices} == set(range(len(sizes)))


@pytest.mark.parametrize("name", ON_CPUS)
def test_a_shipped_config_fits_its_main_memory(name: str, folders: Folders) -> None:
    model, gigabytes = ON_CPUS[name]
    config = load_stage_config(find_shipped_config(name))
    report, machine = Report(model), DeviceMemory(None, "memory", gigabytes * 10**9, gigabytes * 10**9)
    check_cpu_memory(config, sizes_of(config, folders(model)), machine, 0, report)
    assert report.findings == []


def test_graphs_of_more_tokens_take_memory_from_the_kv_cache(folders: Folders) -> None:
    config = load_stage_config(find_shipped_config("qwen3_omni"))
    sizes = sizes_of(config, folders("30b"))

    def kv_bytes(**engine_args: object) -> int:
        thinker = config.stages["thinker"]
        changed = thinker.model_copy(update={"engine_args": {**thinker.engine_args, **engine_args}})
        stages = {**config.stages, "thinker": changed}
        with_arguments = config.model_copy(update={"stages": stages})
        needs = stage_memory("thinker", with_arguments, sizes, int(FOUND_141 * GIB))
        assert needs.kv_cache is not None
        return needs.kv_cache

    shipped, fewer, none = kv_bytes(), kv_bytes(max_cudagraph_capture_size=512), kv_bytes(enforce_eager=True)

    assert fewer - shipped == pytest.approx(2.9e9, rel=0.01)  # docs/performance.md
    assert none - fewer == pytest.approx(1.1e9, rel=0.05)


# -- without a config

TUNED = (32768, 64)
CHOSEN: Mapping[tuple[Quantization | None, tuple[float, ...]], tuple[int, int] | None] = {
    (None, (48.0,)): None,
    (None, (80.0,)): (16384, 8),
    (None, (96.0,)): TUNED,
    (None, (141.0,)): TUNED,
    (None, (48.0, 48.0)): None,
    (None, (80.0, 80.0)): TUNED,
    ("fp8", (40.0,)): None,
    ("fp8", (48.0,)): (4096, 4),
    ("fp8", (80.0,)): TUNED,
    ("fp8", (40.0, 40.0)): (32768, 16),
    ("fp8", (48.0, 48.0)): TUNED,
}
"""The table of docs/configuration.md: context and requests at once, by precision and GiB of the GPUs."""


def test_qwen3_omni_gets_the_largest_deployment_that_fits(folders: Folders) -> None:
    base = load_stage_config(find_shipped_config("qwen3_omni"))
    model = sizes_of(base, folders("30b"))

    def planned(quantization: Quantization | None, sizes: tuple[float, ...]) -> StageConfig | None:
        try:
            return plan(gpus(list(sizes)), base, model, quantization)
        except ConfigError:
            return None

    configs = {key: planned(*key) for key in CHOSEN}
    assert {
        key: config and (config.stages["thinker"].max_model_len, config.stages["thinker"].max_num_seqs)
        for key, config in configs.items()
    } == CHOSEN
    on_two, on_one = configs[None, (80.0, 80.0)], configs[None, (80.0,)]
    assert on_two is not None
    assert on_one is not None
    assert [
        [stage.engine_args[CAPTURE_SIZE] for stage in config.stages.values() if isinstance(stage, ArStage)]
        for config in (on_two, on_one)
    ] == [[2048, 2048], [128, 128]]
    assert [stage.devices for stage in on_two.stages.values()] == [(0,), (1,), (1,)]


TTS_SIZES = (7.65, 8.0, 10.0, 11.6, 16.0, 24.0, 48.0, 80.0, 141.0)
"""GiB. A card that is sold with 8 GB has the first."""
TTS_CHOSEN: Mapping[tuple[str, str], tuple[tuple[int, int] | None, ...]] = {
    ("tts 0b6", "custom_voice"): ((8192, 8), (8192, 16), (8192, 32), *[(8192, 64)] * 6),
    ("tts 0b6", "base"): ((4096, 4), (8192, 4), (8192, 16), *[(8192, 64)] * 6),
    ("tts 1b7", "voice_design"): ((4096, 4), (8192, 4), (8192, 16), *[(8192, 64)] * 6),
    ("tts 1b7", "base"): (None, None, (4096, 4), *[(8192, 64)] * 6),
}
"""The table of docs/configuration.md: context and requests at once."""


@pytest.mark.parametrize(("model", "kind"), TTS_CHOSEN)
def test_qwen3_tts_gets_the_largest_deployment_that_fits(model: str, kind: str, folders: Folders) -> None:
    folder = folders(model)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tts_model_type": kind}))
    base = load_for(find_shipped_config("qwen3_tts"), load_family("stages.qwen3_tts:FAMILY").outputs(folder))
    sizes = sizes_of(base, folder)
    for gib, chosen in zip(TTS_SIZES, TTS_CHOSEN[model, kind], strict=True):
        if chosen is None:
            with pytest.raises(
                ConfigError, match=r"does not fit: .* What would fit: one GPU with 11 GB, two"
            ):
                plan(gpus([gib]), base, sizes, None)
            continue
        planned, report = plan(gpus([gib]), base, sizes, None), Report(model)
        check_gpu_memory(planned, sizes, gpus([gib]), report)
        assert report.findings == []
        assert ("voice_encoder" in planned.stages) == (kind == "base")
        talker = planned.stages["talker"]
        assert (talker.max_model_len, talker.max_num_seqs) == chosen, gib


LLM_GPUS = ((16.0,), (20.0,), (24.0,), (32.0,), (40.0,), (48.0,), (16.0, 16.0), (24.0, 24.0))
"""GiB."""
LLM_CHOSEN: Mapping[tuple[str, Quantization | None], tuple[tuple[int, int] | None, ...]] = {
    ("llm 4b", None): (None, (8192, 8), (16384, 8), (32768, 32), TUNED, TUNED, (32768, 16), TUNED),
    ("llm 4b", "fp8"): ((8192, 4), (16384, 8), (32768, 16), (32768, 32), TUNED, TUNED, (32768, 32), TUNED),
    ("llm 8b", None): (None, None, None, (16384, 8), (32768, 32), TUNED, None, (32768, 16)),
    ("llm 8b", "fp8"): (None, (4096, 4), (16384, 8), (32768, 32), TUNED, TUNED, (16384, 8), TUNED),
}
"""The table of docs/configuration.md: context and requests at once, without voices that are cloned."""


@pytest.mark.parametrize(("model", "quantization"), LLM_CHOSEN)
def test_a_spoken_language_model_gets_the_largest_deployment_that_fits(
    model: str, quantization: Quantization | None, folders: Folders
) -> None:
    base = load_for(find_shipped_config("spoken_llm"), {"text", "audio"})
    sizes = sizes_of(base, folders(model))

    def planned(gibs: tuple[float, ...]) -> tuple[int, int] | None:
        devices, report = gpus(list(gibs)), Report(model)
        try:
            config = plan(devices, base, sizes, quantization)
        except ConfigError:
            return None
        check_gpu_memory(config, sizes, devices, report)
        assert report.findings == []
        return config.stages["thinker"].max_model_len, config.stages["thinker"].max_num_seqs

    assert tuple(map(planned, LLM_GPUS)) == LLM_CHOSEN[model, quantization]


def test_qwen3_omni_without_a_talker_gets_the_thinker_alone(folders: Folders) -> None:
    """The Thinking and Captioner releases."""
    folder = folders("30b")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"enable_audio_output": False}))
    base = load_for(find_shipped_config("qwen3_omni"), load_family("qwen3_omni").outputs(folder))
    model = sizes_of(base, folder)

    chosen = plan(gpus([80.0]), base, model, None)

    assert (list(chosen.stages), chosen.edges) == (["thinker"], ())
    assert (chosen.stages["thinker"].max_model_len, chosen.stages["thinker"].max_num_seqs) == TUNED
