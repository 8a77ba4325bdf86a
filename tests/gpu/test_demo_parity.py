"""The demo checkpoints of both families on GPUs: float32, torch.compile and CUDA graphs on, all three stages
on one device, where the shipped configs for two and four GPUs have them, or with the thinker's layers shared
by two.

Run by hand (`pytest -m gpu tests/gpu -s`), with TF32 off everywhere and an attention backend that takes
float32:

    NVIDIA_TF32_OVERRIDE=0 TRITON_F32_DEFAULT=ieee pytest -m gpu tests/gpu -s

With VLLM_USE_V2_MODEL_RUNNER=0 the same runs on vLLM's V1 model runner.

The reference runs on the CPU of the same machine. A token of Qwen2.5-Omni may differ only in a case where the
reference's two best candidates lie closer than `MAX_GAP`; such cases are printed.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.offline import OmniOutput
from omni_server.verify.compare import signal_to_noise_db
from tests.checkpoints.write import make_demo_checkpoint
from tests.integration.live import LiveOmni, demo_config
from tests.integration.parity import VIDEOS, Expected, expected, qwen3_config
from tests.omni_families import QWEN2_5_OMNI, QWEN3_OMNI
from tests.reference.cases import CASES
from tests.reference.qwen3_cases import QWEN3_CASES
from tests.reference.qwen3_reference import Qwen3Reference
from tests.reference.reference import Reference, ReferenceResult

pytestmark = pytest.mark.gpu

GENERATION = 1 if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0" else 2
"""Asked for before the server sets what nobody has set."""

MAX_GAP = 1e-3
MIN_SNR_DB = 60.0
# With max_num_seqs 8, vLLM would capture graphs of up to 16 tokens: then prompts would hardly ever meet one.
ON_GPU = {"enforce_eager": False, "attention_backend": "TRITON_ATTN", "max_cudagraph_capture_size": 512}


@pytest.fixture(scope="module", params=[QWEN2_5_OMNI.name, QWEN3_OMNI.name])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint", family=family)


@pytest.fixture(scope="module")
def wanted(family: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Expected[Any]]:
    if family == QWEN2_5_OMNI.name:
        reference = Reference(checkpoint)
        return [expected(reference, case) for case in CASES.values()]
    qwen3_reference = Qwen3Reference(checkpoint, tmp_path_factory.mktemp("answers"))
    qwen3_reference.answers_of(QWEN3_CASES)
    return [expected(qwen3_reference, case) for case in QWEN3_CASES.values()]


def shipped_places(name: str) -> dict[str, dict[str, Any]]:
    stages = load_stage_config(find_shipped_config(name)).stages
    return {stage: {"devices": told.devices, "replicas": told.replicas} for stage, told in stages.items()}


@pytest.fixture(scope="module", params=["", ".2gpu", ".4gpu", "tensor parallel"])
def live(request: pytest.FixtureRequest, family: str, checkpoint: Path) -> Iterator[LiveOmni]:
    if request.param == "tensor parallel":
        places = shipped_places(family) | {"thinker": {"devices": [0, 1], "tensor_parallel_size": 2}}
    else:
        places = shipped_places(f"{family}{request.param}")
    if torch.cuda.device_count() <= max(max(place["devices"]) for place in places.values()):
        pytest.skip("not as many GPUs here")
    config_of = demo_config if family == QWEN2_5_OMNI.name else qwen3_config
    chunks = {"chunks": {"mode": "whole"}} if family == QWEN2_5_OMNI.name else {}
    media = {} if family == QWEN2_5_OMNI.name else VIDEOS["engine_args"]
    config = config_of(
        platform="cuda",
        **chunks,
        stages={
            "thinker": {"gpu_memory_utilization": 0.2, "engine_args": ON_GPU | media, **places["thinker"]},
            "talker": {"gpu_memory_utilization": 0.2, "engine_args": dict(ON_GPU), **places["talker"]},
            "code2wav": {"gpu_memory_utilization": 0.2, **places["code2wav"]},
        },
    )
    running = LiveOmni(checkpoint, config)
    yield running
    running.close()


def test_the_language_models_run_on_the_runner_that_was_asked_for(live: LiveOmni) -> None:
    generations = live.runner_generations()
    assert {name.split("/")[0] for name in generations} == {"thinker", "talker"}
    assert set(generations.values()) == {GENERATION}


def test_answers_one_by_one_equal_the_reference(live: LiveOmni, wanted: list[Expected[Any]]) -> None:
    _compare("one by one", [live.answer(want.request) for want in wanted], wanted)


def test_answers_together_equal_the_reference(live: LiveOmni, wanted: list[Expected[Any]]) -> None:
    _compare("together", live.answers([want.request for want in wanted]), wanted)


def test_nothing_is_held_at_the_end(live: LiveOmni) -> None:
    assert live.held_rows() == 0
    assert all(slots.in_use == 0 for slots in live.omni.row_slots().values())


def _compare(run: str, answers: list[OmniOutput], wanted: list[Expected[Any]]) -> None:
    different, may_differ, ratios = [], [], []
    for answer, want in zip(answers, wanted, strict=True):
        result = want.result
        if answer.token_ids == result.text_ids and answer.codes == result.codes:
            ratios.append(signal_to_noise_db(result.waveform, answer.audio))
            continue
        different.append(want.case.name)
        if isinstance(result, ReferenceResult):
            may_differ.append(min(result.min_top2_gap_thinker, result.min_top2_gap_talker) < MAX_GAP)
        else:
            may_differ.append(False)
    finite = [ratio for ratio in ratios if ratio != float("inf")]
    report = {
        "run": run,
        "cases": len(wanted),
        "equal": len(ratios),
        "different": different,
        "lowest_waveform_snr_db": min(finite, default=None),
        "tf32_override": os.environ.get("NVIDIA_TF32_OVERRIDE"),
    }
    print("\n" + json.dumps(report, indent=1))  # noqa: T201
    assert all(may_differ)
    assert np.min(finite) > MIN_SNR_DB
