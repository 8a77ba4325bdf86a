"""Linear layers that use `small_batch_gemm_kernel` for the small batches of decode steps, and vLLM's products
otherwise.

vLLM's option for unquantized kernels, `linear_backend`, only supports those of FlashInfer. The hook for other
kernels is a layer's `quant_method`, which this module replaces after the weights are loaded.
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
    """`torch.nn.functional.linear` as one operator for the compiler, so that the number of rows selects the
    kernel during graph capture, not compilation."""
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
    """Creates, loads and stores weights as vLLM does."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product: torch.Tensor = torch.ops.vllm.omni_small_batch_linear(x, layer.weight, bias)
        return product


def use_small_batch_gemm(model: nn.Module) -> int:
    """Use our kernels for small batches in those layers of a loaded `model` that benefit. Returns their
    number.

    Changes no layer on an unsupported GPU, and no quantized layer. Must be called before the model is
    compiled. Compiles the kernels, which must not happen during CUDA graph capture."""
    layers = [layer for layer in model.modules() if isinstance(layer, LinearBase) and _gains(layer)]
    for device in {layer.weight.device for layer in layers}:
        _scratches[device] = Scratch(max(layer.weight.shape[0] for layer in layers), device)
    alike = {}
    for layer in layers:
        layer.quant_method = SmallBatchLinearMethod()
        # vLLM's parameter classes, which contain their loading logic, are slow to use from Python: with many
        # rows and no captured graph, that is half the operator's time.
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
    # Exactly this class: a subclass may multiply in its own way.
    if type(layer.quant_method) is not UnquantizedLinearMethod:
        return False
    weight = layer.weight
    if weight.dtype not in _DTYPES or not weight.is_contiguous() or not fits_decoding_kernels(weight.device):
        return False
    return any(plan(num_rows, *weight.shape) is not None for num_rows in (1, MAX_ROWS))
