"""When attention is one kernel, and what the kernel is given then."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata

from stages.qwen2_5_omni.rope_attention import RopeAttention

HEADS, KV_HEADS, DIM = 4, 2, 32
NAME = "layers.0.attn"


@dataclass(frozen=True)
class Step:
    """What vLLM says of a step of `num_requests` requests with one new token each."""

    num_requests: int
    max_query_len: int = 1
    num_rows: int | None = None
    has_slots: bool = True
    cache_dtype: torch.dtype = torch.float32
    metadata: bool = True


def metadata_of(step: Step) -> Any:
    fields = dict.fromkeys(TritonAttentionMetadata.__dataclass_fields__)
    fields |= {
        "num_actual_tokens": step.num_requests,
        "max_query_len": step.max_query_len,
        "seq_lens": torch.full((step.num_requests,), 7, dtype=torch.int32),
        "block_table": torch.zeros(step.num_requests, 3, dtype=torch.int32),
    }
    return TritonAttentionMetadata(**fields)


@pytest.fixture
def attend() -> Callable[[Step], tuple[list[dict[str, torch.Tensor]], torch.Tensor, torch.Tensor]]:
    """Runs the operator: what the kernel was called with, what came out, and which value stands for which
    way."""

    def run(step: Step) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor, torch.Tensor]:
        calls: list[dict[str, torch.Tensor]] = []
        names = ("qkv", "positions", "cos_sin", "cache", "block_table", "lengths", "slots", "out")

        def kernel(*tensors: torch.Tensor) -> None:
            calls.append(dict(zip(names, tensors, strict=True)))
            tensors[-1].fill_(1.0)

        def turn(qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
            assert positions.shape == (3, len(qkv))
            assert cos_sin is layer.rotary_emb.cos_sin_cache
            qkv += 0.5

        layer: Any = SimpleNamespace(
            q_size=HEADS * DIM,
            kv_size=KV_HEADS * DIM,
            attn=_Attention(),
            rotary_emb=_Rope(),
            _kernel=kernel,
            _rotate=turn,
        )
        layer.attend = lambda *args: RopeAttention.attend(layer, *args)
        layer.attn.kv_cache = torch.zeros(9, KV_HEADS, 16, 2 * DIM, dtype=step.cache_dtype)
        rows = step.num_requests if step.num_rows is None else step.num_rows
        slots = {NAME: torch.arange(step.num_requests)} if step.has_slots else {}
        context = ForwardContext(
            no_compile_layers={NAME: layer.attn, "ours": layer},
            attn_metadata={NAME: metadata_of(step)} if step.metadata else None,
            slot_mapping=slots,
        )
        out = torch.zeros(rows, HEADS * DIM)
        qkv = torch.zeros(rows, (HEADS + 2 * KV_HEADS) * DIM)
        with override_forward_context(context):
            torch.ops.vllm.omni_attention_with_rope(qkv, torch.zeros(3, rows, dtype=torch.int64), out, "ours")
        return calls, out, qkv

    return run


class _Rope:
    cos_sin_cache = torch.zeros(8, DIM)


class _Attention:
    """vLLM's, which leaves a mark of its own on what has been turned."""

    layer_name = NAME
    kv_cache: torch.Tensor

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + 1.5


def test_a_decoding_step_is_one_kernel(attend: Any) -> None:
    [call], out, qkv = attend(Step(5))
    assert call["qkv"].data_ptr() == qkv.data_ptr()
    assert call["lengths"].tolist() == [7] * 5
    assert call["slots"].tolist() == [0, 1, 2, 3, 4]
    assert (out == 1).all()


@pytest.mark.parametrize("num_rows", [8, 3])
def test_rows_and_requests_are_padded_independently(attend: Any, num_rows: int) -> None:
    """No row without a request, and no request without a row."""
    [call], out, _ = attend(Step(5, num_rows=num_rows))
    num_real = min(5, num_rows)
    assert call["qkv"].shape[0] == call["out"].shape[0] == call["positions"].shape[1] == num_real
    assert (out[:num_real] == 1).all()


@pytest.mark.parametrize(
    "change",
    [
        {"max_query_len": 2},
        {"num_requests": 65},
        {"has_slots": False},
        {"cache_dtype": torch.float16},
        {"metadata": False},
    ],
    ids=str,
)
def test_all_else_is_left_to_vllm_behind_the_rotary_embedding(attend: Any, change: dict[str, Any]) -> None:
    calls, out, _ = attend(replace(Step(5), **change))
    assert calls == []
    assert (out == 2).all()


def test_steps_of_another_backend_are_not_the_kernels() -> None:
    """vLLM takes FlashInfer on some GPUs, whose metadata hold a plan for the step's lengths."""
    metadata = SimpleNamespace(**vars(metadata_of(Step(5))))
    assert not RopeAttention.attends_by_kernel(layer_with(), metadata)


def layer_with(cache_dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(
        _kernel=print,
        attn=SimpleNamespace(kv_cache=torch.zeros(1, dtype=cache_dtype)),
        qkv_proj=SimpleNamespace(params_dtype=torch.float32),
    )
