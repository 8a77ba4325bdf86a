"""Qwen3-Omni's demo checkpoint on a GPU in float32, as tests/gpu/test_demo_parity.py tests that of
Qwen2.5-Omni:

    NVIDIA_TF32_OVERRIDE=0 TRITON_F32_DEFAULT=ieee pytest -m gpu tests/gpu/test_qwen3_demo_parity.py -s
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omni_server.offline import OmniOutput
from omni_server.verify.compare import signal_to_noise_db
from tests.checkpoints.write import make_demo_checkpoint
from tests.gpu.test_demo_parity import ON_GPU
from tests.integration.live import LiveOmni
from tests.integration.parity import VIDEOS, Expected, expected, qwen3_config
from tests.reference.qwen3_cases import QWEN3_CASES
from tests.reference.qwen3_reference import Qwen3Reference

pytestmark = pytest.mark.gpu

MIN_SNR_DB = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint", family="qwen3_omni")


@pytest.fixture(scope="module")
def wanted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Expected]:
    reference = Qwen3Reference(checkpoint, tmp_path_factory.mktemp("answers"))
    reference.answers_of(QWEN3_CASES)
    return [expected(reference, case) for case in QWEN3_CASES.values()]


@pytest.fixture(scope="module")
def live(checkpoint: Path) -> Iterator[LiveOmni]:
    media = VIDEOS["engine_args"]
    config = qwen3_config(
        platform="cuda",
        stages={
            "thinker": {"gpu_memory_utilization": 0.1, "engine_args": {**ON_GPU, **media}},
            "talker": {"gpu_memory_utilization": 0.1, "engine_args": dict(ON_GPU)},
            "code2wav": {"gpu_memory_utilization": 0.1},
        },
    )
    running = LiveOmni(checkpoint, config)
    yield running
    running.close()


def test_answers_one_by_one_equal_the_reference(live: LiveOmni, wanted: list[Expected]) -> None:
    _compare("one by one", [live.answer(want.request) for want in wanted], wanted)


def test_answers_together_equal_the_reference(live: LiveOmni, wanted: list[Expected]) -> None:
    _compare("together", live.answers([want.request for want in wanted]), wanted)


def _compare(run: str, results: list[OmniOutput], wanted: list[Expected]) -> None:
    different, ratios = [], []
    for result, want in zip(results, wanted, strict=True):
        if result.token_ids == want.result.text_ids and result.codes == want.result.codes:
            ratios.append(signal_to_noise_db(want.result.waveform, result.audio))
        else:
            different.append(want.case.name)
    print(f"\n{run}: {len(ratios)} equal, {different} differ, SNR at least {min(ratios):.1f} dB")  # noqa: T201
    assert not different
    assert np.min(ratios) > MIN_SNR_DB
