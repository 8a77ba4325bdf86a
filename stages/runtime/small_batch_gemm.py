"""Linear layers that multiply a decoding step's small batch by `small_batch_gemm_kernel`, and all else as
vLLM does.

vLLM's own choice among kernels for weights that are not quantized, `linear_backend`, knows FlashInfer's only;
its hook for another is a layer's `quant_method`, which is replaced after the weights are loaded.
"""

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.utils.torch_utils import direct_register_custom_op

from stages.runtime.kernel_launch import fits_decoding_kernels
from stages.runtime.small_batch_gemm_kernel import MAX_ROWS, Scratch, plan

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_scratches: dict[torch.device, Scratch] = {}


def small_batch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear`. It is one operator for the compiler, so that the number of rows decides
    when a graph is captured, not when the model is compiled."""
    if x.numel() > MAX_ROWS * x.shape[-1]:
        return nn.functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    chosen = plan(rows.shape[0], *weight.shape)
    if chosen is None:
        return nn.functional.linear(x, weight, bias)
    return (
        _scratches[weight.device].product(chosen, rows, weight, bias).reshape(*x.shape[:-1], weight.shape[0])
    )


def _result_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


direct_register_custom_op("omni_small_batch_linear", small_batch_linear, fake_impl=_result_shape)


class SmallBatchLinearMethod(UnquantizedLinearMethod):
    """Weights are made, loaded and kept as vLLM does."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product: torch.Tensor = torch.ops.vllm.omni_small_batch_linear(x, layer.weight, bias)
        return product


def use_small_batch_gemm(model: nn.Module) -> int:
    """Let those layers of a loaded `model` that gain by it multiply small batches by our kernels; returns how
    many.

    None on a GPU that the kernels are not made for; quantized layers are left alone. To be called before the
    model is compiled. Compiles the kernels, which must not happen while CUDA graphs are captured."""
    layers = [layer for layer in model.modules() if isinstance(layer, LinearBase) and _gains(layer)]
    for device in {layer.weight.device for layer in layers}:
        _scratches[device] = Scratch(max(layer.weight.shape[0] for layer in layers), device)
    alike = {}
    for layer in layers:
        layer.quant_method = SmallBatchLinearMethod()
        # vLLM's kinds of parameters, which know how they are loaded, are slow to use from Python: with many
        # rows, where no graph has been captured, that is half of what the operator takes.
        layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
        if layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias.data, requires_grad=False)
        alike[layer.weight.shape, layer.bias is None] = layer
    for layer in alike.values():
        for num_rows in (1, MAX_ROWS):
            x = layer.weight.new_zeros(num_rows, layer.weight.shape[1])
            small_batch_linear(x, layer.weight, layer.bias)
    return len(layers)


def _gains(layer: LinearBase) -> bool:
    # The very class: one derived from it multiplies in its own way.
    if type(layer.quant_method) is not UnquantizedLinearMethod:
        return False
    weight = layer.weight
    if weight.dtype not in _DTYPES or not weight.is_contiguous() or not fits_decoding_kernels(weight.device):
        return False
    return any(plan(num_rows, *weight.shape) is not None for num_rows in (1, MAX_ROWS))
