"""What may change vLLM's compile cache key, and what is another one at each start and must not."""

import msgspec
import pytest

from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.protocol.runtime_config import QueueSpec, StageRuntimeConfig
from omni_server.protocol.start_report import ProgressSpec
from stages.qwen2_5_omni.options import SolverConfig
from tests.reference.token2wav import code2wav_stage

QUEUE = QueueSpec(capacity=16, path="/dev/shm/queue-1", slot_bytes=4096, max_portions=8, num_consumers=1)
AR = StageRuntimeConfig(
    model_dir="/models/one",
    row_producer="package.module:Producer",
    output_queue=QUEUE,
    input_queues=(QUEUE,),
    progress=ProgressSpec("thinker", "socket-1"),
)
DIFFUSION = DiffusionRuntimeConfig(
    stage=code2wav_stage(max_num_seqs=16, max_num_batched_tokens=8192, max_model_len=4096),
    compute_dtype="float16",
    is_fast=True,
    progress=ProgressSpec("code2wav", "socket-1"),
)


@pytest.mark.parametrize(
    "change",
    [
        {"output_queue": msgspec.structs.replace(QUEUE, path="/dev/shm/queue-2")},
        {"input_queues": (msgspec.structs.replace(QUEUE, path="/dev/shm/queue-2"),)},
        {"progress": ProgressSpec("thinker", "socket-2")},
    ],
)
def test_what_differs_from_start_to_start_keeps_the_hash(change: dict[str, object]) -> None:
    assert msgspec.structs.replace(AR, **change).compute_hash() == AR.compute_hash()


@pytest.mark.parametrize("change", [{"row_producer": None}])
def test_another_role_changes_the_hash(change: dict[str, object]) -> None:
    assert msgspec.structs.replace(AR, **change).compute_hash() != AR.compute_hash()


@pytest.mark.parametrize("change", [{"progress": ProgressSpec("code2wav", "socket-2")}])
def test_what_differs_from_start_to_start_keeps_the_hash_of_a_diffusion_stage(
    change: dict[str, object],
) -> None:
    assert msgspec.structs.replace(DIFFUSION, **change).compute_hash() == DIFFUSION.compute_hash()


def test_what_a_diffusion_stage_computes_with_changes_its_hash() -> None:
    solver = SolverConfig(num_steps=4)
    for change in (
        {"is_fast": False},
        {"compute_dtype": "float32"},
        {"stage": code2wav_stage(solver=solver)},
    ):
        assert msgspec.structs.replace(DIFFUSION, **change).compute_hash() != DIFFUSION.compute_hash()
