"""The fused kernels in Triton's interpreter, on the CPU, against PyTorch; `tests/unit/stages/test_kernels.py`
runs this file.

They are checked at small sizes and for what they compute, not for what a GPU's compiler makes of them: that
is `tests/gpu/test_fast_code2wav.py`.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavModel,
)

from stages.qwen2_5_omni.code2wav import bigvgan, vocoder_kernels
from stages.qwen2_5_omni.code2wav.bigvgan import FusedBigVGAN
from stages.qwen2_5_omni.code2wav.dit_kernels import TritonDiTOps
from stages.qwen2_5_omni.code2wav.dit_ops import TorchDiTOps
from stages.qwen2_5_omni.code2wav.packing import BlockLayout, Carry, MelJob, pack_windows
from stages.qwen2_5_omni.code2wav.stream_kv import LayerKV

BLOCK_SIZE, HEADS, HEAD_DIM = 24, 2, 32
RELATIVE_BOUND = {torch.float32: 1e-5, torch.float16: 1e-3}
"""Root mean square of the error over that of the result."""


@pytest.fixture(autouse=True)
def _sine_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cannot call CUDA's library."""
    monkeypatch.setattr(vocoder_kernels, "libdevice", SimpleNamespace(fast_sinf=lambda x: tl.sin(x)))


def error(result: torch.Tensor, reference: torch.Tensor) -> float:
    assert result.shape == reference.shape
    return float((result.double() - reference.double()).norm() / reference.double().norm())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("length", "channels"), [(1, 24), (5, 130), (8, 16), (67, 24)])
def test_the_activation_equals_the_reference_module(
    token2wav: Qwen2_5OmniToken2WavModel, length: int, channels: int, dtype: torch.dtype
) -> None:
    """Lengths around one run of outputs, and with them runs at either end, at both, and at neither."""
    vocoder = token2wav.code2wav_bigvgan_model
    taps = bigvgan._filter_taps(vocoder)
    reference = type(vocoder.activation_post)(activation=type(vocoder.activation_post.act)(channels))
    draw = torch.Generator().manual_seed(length)
    reference.act.alpha.copy_(torch.randn(channels, generator=draw))
    reference.act.beta.copy_(torch.randn(channels, generator=draw))
    x = (3 * torch.randn(2, length, channels, generator=draw)).to(dtype)
    result = bigvgan._snake(reference, taps)(x, dtype=dtype)
    assert result.dtype == dtype
    assert error(result, reference(x.float().transpose(1, 2)).transpose(1, 2)) < RELATIVE_BOUND[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("length", [1, 70])
@pytest.mark.parametrize(
    ("channels", "out_channels", "taps", "dilation"), [(80, 100, 7, 1), (48, 1, 7, 1), (16, 20, 11, 3)]
)
def test_a_convolution_equals_the_operator(
    channels: int, out_channels: int, taps: int, dilation: int, length: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(length)
    x = torch.randn(3, length, channels, generator=draw).to(dtype)
    weight = (torch.randn(taps, channels, out_channels, generator=draw) / (taps * channels) ** 0.5).to(dtype)
    bias = torch.randn(out_channels, generator=draw)
    residual, before = torch.randn(2, 3, length, out_channels, generator=draw)
    padding = dilation * (taps - 1) // 2
    plain = F.conv1d(
        x.float().transpose(1, 2), weight.float().permute(2, 1, 0), bias, padding=padding, dilation=dilation
    ).transpose(1, 2)

    def result(**options: object) -> torch.Tensor:
        return vocoder_kernels.conv(x, weight, bias, left_padding=padding, dilation=dilation, **options)  # type: ignore[arg-type]

    assert error(result(dtype=dtype), plain) < RELATIVE_BOUND[dtype]
    with_residual = result(dtype=torch.float32, residual=residual, scale=0.25)
    assert error(with_residual, 0.25 * (plain + residual)) < RELATIVE_BOUND[dtype]
    total = before.clone()
    assert result(dtype=torch.float32, residual=residual, out=total, scale=0.25) is total
    assert error(total, before + 0.25 * (plain + residual)) < RELATIVE_BOUND[dtype]


@torch.no_grad()
def test_the_fused_vocoder_equals_the_reference() -> None:
    config = Qwen2_5OmniBigVGANConfig(
        upsample_initial_channel=32,
        upsample_rates=[5, 2],
        upsample_kernel_sizes=[11, 4],
        resblock_kernel_sizes=[3, 7],
        resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
    )
    draw = torch.Generator().manual_seed(2)
    vocoder = Qwen2_5OmniToken2WavBigVGANModel(config).eval()
    for parameter in vocoder.parameters():
        # Wilder snakes would magnify the rounding of either side.
        gain = 0.3 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
        parameter.copy_(gain * torch.randn(parameter.shape, generator=draw))
    vocoder.conv_post.weight *= 0.02  # or the waveform would be clamped
    mel = -4.5 + torch.randn(2, 4, 80, generator=draw)
    reference = vocoder(mel.transpose(1, 2))
    assert 0.01 < float(reference.square().mean().sqrt()) < 0.9
    assert error(FusedBigVGAN(vocoder, torch.float32).synthesize(mel), reference) < 1e-5


def mixed_layout() -> BlockLayout:
    """Windows that read a slot, keep a block, do both or neither; two of them end in part of a block."""
    carries = [None, Carry(2, True, None), Carry(0, False, 1), Carry(1, True, 0)]
    lengths = [25, 12, 23, 12]
    return pack_windows(
        [
            MelJob(torch.zeros(length, dtype=torch.int64), torch.zeros(2 * length, 80), 0, carry)
            for length, carry in zip(lengths, carries, strict=True)
        ],
        codes_per_block=BLOCK_SIZE // 2,
        num_blocks=8,
        device=torch.device("cpu"),
    ).layout


def random_qkv(layout: BlockLayout, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(6)
    return torch.randn(2 * layout.num_blocks * BLOCK_SIZE, 3 * HEADS * HEAD_DIM, generator=draw).to(dtype)


def random_slots(dtype: torch.dtype) -> LayerKV:
    """Three slots, of which each holds five intervals for two branches."""
    draw = torch.Generator().manual_seed(7)
    values = torch.randn(3, 5, 2, BLOCK_SIZE, 2 * HEADS * HEAD_DIM, generator=draw).to(dtype)
    return LayerKV(values, torch.tensor(3, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("back", "ahead", "has_slots"),
    [(False, False, False), (True, True, True), (True, False, False), (False, True, False)],
)
def test_attention_equals_the_yardstick(back: bool, ahead: bool, has_slots: bool, dtype: torch.dtype) -> None:
    layout, kept = mixed_layout(), random_slots(dtype)
    qkv = random_qkv(layout, dtype)
    angles = torch.randn(5 * BLOCK_SIZE, HEAD_DIM // 2, generator=torch.Generator().manual_seed(8))
    rotary = torch.stack([angles.cos(), angles.sin()])
    in_float32 = LayerKV(kept.values.float(), kept.interval)
    result = TritonDiTOps().attention(
        qkv, layout, rotary, head_dim=HEAD_DIM, back=back, ahead=ahead, kept=kept if has_slots else None
    )
    expected = TorchDiTOps().attention(
        qkv.float(),
        layout,
        rotary,
        head_dim=HEAD_DIM,
        back=back,
        ahead=ahead,
        kept=in_float32 if has_slots else None,
    )
    is_valid = torch.arange(BLOCK_SIZE) < layout.num_frames[:, None]
    rows = is_valid.flatten().repeat(2)
    assert result.dtype == dtype
    assert not result.isnan().any()
    assert error(result[rows], expected[rows]) < RELATIVE_BOUND[dtype]


def test_the_same_frames_are_kept() -> None:
    layout = mixed_layout()
    qkv = random_qkv(layout, torch.float16)
    fused, plain, before = (random_slots(torch.float16) for _ in range(3))
    TritonDiTOps().keep(qkv, layout, fused)
    TorchDiTOps().keep(qkv, layout, plain)
    assert torch.equal(fused.values, plain.values)
    assert int((fused.values != before.values).any(-1).sum()) == 2 * 2 * BLOCK_SIZE, (
        "two blocks in two branches"
    )


def test_the_gated_norm_equals_the_operators() -> None:
    draw = torch.Generator().manual_seed(9)
    hidden, update = torch.randn(2, 5, 100, generator=draw)
    gate, scale, shift = torch.randn(3, 100, generator=draw)
    total, expected_total = hidden.clone(), hidden.clone()
    result = TritonDiTOps().norm(total, scale, shift, torch.float32, (gate, update))
    expected = TorchDiTOps().norm(expected_total, scale, shift, torch.float32, (gate, update))
    assert error(total, expected_total) < 1e-6
    assert error(result, expected) < 1e-6
    normed = TritonDiTOps().norm(hidden, scale, shift, torch.float16)
    assert error(normed, TorchDiTOps().norm(hidden, scale, shift, torch.float32)) < 1e-3
