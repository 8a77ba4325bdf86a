"""Attention and rotary embedding as one operator; in a decode step on a GPU, that is one kernel.

vLLM's hook for custom attention is an attention backend, which runs after the rotary embedding and the write
into the cache. Putting these in the same kernel requires a model-specific operator, which some of vLLM's
models also have (`vllm.model_executor.layers.hpc.rope_norm`).
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer
from vllm.model_executor.models.qwen2 import Qwen2Attention, Qwen2DecoderLayer
from vllm.utils.torch_utils import direct_register_custom_op

from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.runtime.kernel_launch import fits_decoding_kernels

VllmAttention: TypeAlias = Qwen2Attention | LlamaAttention

_OPERATOR = "omni_attention_with_rope"


class RopeAttention(nn.Module):
    """Replaces a model's attention; its submodules keep their names."""

    def __init__(self, attention: VllmAttention, config: VllmConfig) -> None:
        super().__init__()
        self.q_size, self.kv_size = attention.q_size, attention.kv_size
        self.qkv_proj = attention.qkv_proj
        self.o_proj = attention.o_proj
        self.rotary_emb = attention.rotary_emb
        self.attn = attention.attn
        # From `stages.runtime.attention_kernels`, for this layer's sizes: a `DecodeAttention` for decode
        # steps and a `RopeInPlace` for all others.
        self._kernel: Callable[..., None] | None = None
        self._rotate: Callable[..., None] | None = None
        self._name = f"{self.attn.layer_name}.{_OPERATOR}"
        compilation = config.compilation_config
        # Inside an operator, vLLM's attention need not be one itself.
        self.attn.use_direct_call = True
        # The operator looks up its layer by name, as vLLM's do.
        compilation.static_forward_context[self._name] = self
        # If vLLM splits the model at its attention for piecewise compilation, it must split here.
        if compilation.splitting_ops and f"vllm::{_OPERATOR}" not in compilation.splitting_ops:
            compilation.splitting_ops.append(f"vllm::{_OPERATOR}")

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        attended = qkv.new_empty(qkv.shape[0], self.q_size)
        torch.ops.vllm.omni_attention_with_rope(qkv, positions, attended, self._name)
        output, _ = self.o_proj(attended)
        return output

    def attend(self, qkv: torch.Tensor, positions: torch.Tensor, attended: torch.Tensor) -> None:
        """Computes `attended` `[num_tokens, q_size]` from `qkv` `[num_tokens, q_size + 2 * kv_size]` and
        `positions` `[3, num_tokens]`, and writes keys and values into the cache."""
        if self._kernel is not None:
            # One new token per request, few enough requests, and a plain cache.
            metadata, _, cache, slots = get_attention_context(self.attn.layer_name)
            if _is_decoding(metadata) and slots is not None and cache.dtype == qkv.dtype:
                # Rows and requests may be padded to different numbers.
                num_rows = min(len(qkv), len(metadata.seq_lens), len(metadata.block_table), len(slots))
                self._kernel(
                    qkv[:num_rows],
                    positions[:, :num_rows],
                    self.rotary_emb.cos_sin_cache,
                    cache,
                    metadata.block_table,
                    metadata.seq_lens,
                    slots,
                    attended[:num_rows],
                )
                return
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self._rotate is not None:
            self._rotate(qkv, positions, self.rotary_emb.cos_sin_cache)
        else:  # not compiled: on a GPU, vLLM's own kernel is faster
            rotate = self.rotary_emb.forward_cuda if qkv.is_cuda else self.rotary_emb
            q, k = rotate(positions, q, k)
        attended.copy_(self.attn(q, k, v))

    def attends_by_kernel(self, metadata: Any) -> bool:
        """Whether the kernel computes a step with this `metadata` from vLLM."""
        return (
            self._kernel is not None
            and _is_decoding(metadata)
            and self.attn.kv_cache.dtype == self.qkv_proj.params_dtype
        )


def _is_decoding(metadata: Any) -> bool:
    """Whether each request has one new token, and the kernel supports the backend's cache."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata

    from stages.runtime.attention_kernels import MAX_REQUESTS

    return (
        isinstance(metadata, FlashAttentionMetadata | TritonAttentionMetadata)
        and metadata.max_query_len == 1
        and metadata.num_actual_tokens <= MAX_REQUESTS
    )


def use_rope_attention(layers: Iterable[nn.Module], config: VllmConfig) -> list[RopeAttention]:
    """Replace the attention of a model's decoder layers with the operator before they are compiled, and use
    our kernels where they support the model. Skips layers on other ranks, and all layers if the stage config
    turns our kernels off."""
    match config.additional_config:
        case StageRuntimeConfig(decoding_kernels=True):
            pass
        case _:
            return []
    attentions = []
    for layer in layers:
        if isinstance(layer, Qwen2DecoderLayer | LlamaDecoderLayer):
            assert isinstance(layer.self_attn, VllmAttention)
            if isinstance(layer.self_attn, Qwen2Attention):
                assert not layer.self_attn.qk_norm, "the operator has no norms of queries and keys"
            layer.self_attn = attention = RopeAttention(layer.self_attn, config)
            attentions.append(attention)
    if attentions:
        _use_kernels(attentions, config)
    return attentions


def _use_kernels(layers: list[RopeAttention], config: VllmConfig) -> None:
    """Let all layers use the same kernels, with shared scratch memory.

    Does nothing if the kernels do not support the GPU or the sizes, if the rotary embedding is not the
    checkpoint's, or with a sliding window, a context spread over ranks, or a cache transferred by layer.
    """
    rope, attn = layers[0].rotary_emb, layers[0].attn
    if (
        not isinstance(rope, MRotaryEmbedding)
        or rope.mrope_section is None
        or len(rope.mrope_section) != 3
        or rope.mrope_interleaved
        or not rope.is_neox_style
        or rope.rotary_dim != attn.head_size
        or attn.head_size not in (32, 64, 128)
        or attn.sliding_window is not None
        or config.parallel_config.decode_context_parallel_size > 1
        or config.kv_transfer_config is not None
        or not fits_decoding_kernels(device := rope.cos_sin_cache.device)
    ):
        return
    from stages.runtime.attention_kernels import DecodeAttention, RopeInPlace

    time, height, width = rope.mrope_section
    section = (time, height, width)
    kernel = DecodeAttention(attn.num_heads, attn.num_kv_heads, attn.head_size, section, device)
    rotate = RopeInPlace(attn.num_heads + attn.num_kv_heads, attn.head_size, section)
    for layer in layers:
        layer._kernel, layer._rotate = kernel, rotate


@eager_break_during_capture  # when vLLM captures graphs of uncompiled models, it breaks them here
def omni_attention_with_rope(
    qkv: torch.Tensor, positions: torch.Tensor, attended: torch.Tensor, layer_name: str
) -> None:
    layer: RopeAttention = get_forward_context().no_compile_layers[layer_name]
    layer.attend(qkv, positions, attended)


def _nothing(qkv: torch.Tensor, positions: torch.Tensor, attended: torch.Tensor, layer_name: str) -> None:
    """Fake for the compiler; returns nothing."""


# vLLM's own rotary embedding also rotates queries and keys in place in `qkv`, which nothing reads afterwards.
direct_register_custom_op(_OPERATOR, omni_attention_with_rope, mutates_args=["attended"], fake_impl=_nothing)
