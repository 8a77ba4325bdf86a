"""Which GPUs run the code predictor's kernels. What they compute is in decoder_kernels_checks.py."""

from types import SimpleNamespace

import pytest
import torch

from stages.qwen_codec.code_predictor import CodePredictor, CodePredictorSizes
from stages.qwen_codec.decoder_kernels import KernelOperations
from stages.runtime.kernel_launch import fits_decoding_kernels
from tests.unit.stages.kernel_launches import Launch, noted_launches

PUBLISHED = CodePredictorSizes(
    num_predicted=15,
    vocab_size=2048,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=5,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
)
SHARED_KIB = {
    "T4": (64, 64),
    "L40S": (100, 99),
    "RTX PRO 6000 Blackwell": (100, 99),
    "A100": (164, 163),
    "H100": (228, 227),
    "B200": (228, 227),
}
"""Shared memory of a multiprocessor, and how much of it one block can have: the CUDA programming guide."""


def tile_bytes(launch: Launch) -> int:
    """Of the operands in shared memory: two steps of the loop, and the rows again once they are normed."""
    if "BLOCK_M" not in launch.kernel.arg_names:
        return 0
    rows, outputs, inputs, is_gated, has_norm = map(
        launch.constant, ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GATED", "HAS_NORM")
    )
    values = 2 * (outputs * (1 + is_gated) + rows + has_norm) + rows * has_norm
    return values * inputs * 2


def test_gpus_run_the_kernels_if_a_block_can_have_the_largest_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        predictor = CodePredictor(PUBLISHED, max_batch_size=64).to(torch.bfloat16)
        predictor.operations = KernelOperations(PUBLISHED.rms_norm_eps)
        with noted_launches(monkeypatch) as launches:
            for count in (1, 2, 8, 16, 32, 64):
                hidden = torch.zeros(count, PUBLISHED.hidden_size, dtype=torch.bfloat16)
                predictor(hidden, hidden, lambda logits, codebook: logits.argmax(-1))
    largest = max(launches, key=tile_bytes)

    needed: int = largest.compiled(80).metadata.shared

    assert needed == tile_bytes(largest) == 113 * 1024
    for name, (multiprocessor, block) in SHARED_KIB.items():
        properties = SimpleNamespace(shared_memory_per_multiprocessor=multiprocessor * 1024)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device, properties=properties: properties
        )
        assert fits_decoding_kernels(torch.device("cuda")) == (needed <= block * 1024), name
