"""The base class of models on diffusion stages. They accept a batch and return one tensor per request."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from omni_server.protocol.corruption import Corruption
from omni_server.transport.result import Failure


@dataclass(frozen=True)
class DiffusionBatch:
    """The requests of one step. Results must be in the same order."""

    request_ids: tuple[str, ...]
    token_ids: tuple[torch.Tensor, ...]
    """int64 [num_tokens] each, on the CPU."""
    inputs: tuple[bytes, ...]
    """Further input of each request, as encoded by its edge."""

    def select(self, indices: Sequence[int]) -> "DiffusionBatch":
        return DiffusionBatch(
            tuple(self.request_ids[i] for i in indices),
            tuple(self.token_ids[i] for i in indices),
            tuple(self.inputs[i] for i in indices),
        )


class DiffusionModel(torch.nn.Module):
    """The base class of models for diffusion stages. A subclass implements `sample` and overrides other
    methods as needed.

    vLLM constructs it as `Model(vllm_config=..., prefix=...)`. Its config is `vllm_config.model_config`:
    `hf_config` is the result of the family's `hf_overrides` for `config.json`, and `model` is the
    checkpoint's folder.
    """

    # vLLM's registry uses these attributes and the signatures of `embed_input_ids` and `forward` to recognize
    # a model that samples no tokens and does not use vLLM's attention.
    is_pooling_model: ClassVar[Literal[True]] = True
    is_attention_free: ClassVar[Literal[True]] = True
    attn_type: ClassVar[str] = "attention_free"

    def __init__(self, *, vllm_config: object, prefix: str = "") -> None:
        super().__init__()

    def sample(self, batch: DiffusionBatch) -> Sequence[torch.Tensor]:
        """Returns the results of the batch: one tensor per request, in order.

        Each result is a floating-point tensor with at least one value, all finite. Raises
        `RejectedRequestsError` for invalid requests.
        """
        raise NotImplementedError

    def prepare(self) -> None:
        """Called once between loading and the first request, for example to compile kernels."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Returns the names of the loaded parameters. A model with weights must override this method: vLLM
        refuses to start if a parameter is missing."""
        return set()

    def randomize_weights(self) -> None:
        """Called in place of `load_weights` with the load format `dummy`. vLLM has set every weight to a
        random value of at most 1e-3; a model whose output is constant with such weights draws larger ones."""

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"{type(self).__name__} runs through sample(batch)")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"{type(self).__name__} runs through sample(batch)")


class RejectedRequestsError(Exception):
    """Raised by a model that finds invalid requests in a batch before it computes anything.

    `reasons` maps each invalid request id to its reason. The batch is run again without these requests.
    """

    def __init__(self, reasons: Mapping[str, Failure]) -> None:
        super().__init__("; ".join(f"{request_id}: {reason}" for request_id, reason in reasons.items()))
        self.reasons = dict(reasons)


def checked_results(results: Sequence[torch.Tensor], batch: DiffusionBatch) -> list[torch.Tensor | Failure]:
    """Returns one entry per request of `batch`, in order: its tensor on the CPU, or why it has none.

    If there are more or fewer results than requests, all fail.
    """
    num_requests = len(batch.request_ids)
    if len(results) != num_requests:
        detail = f"the model answered {num_requests} requests with {len(results)} tensors"
        return [Corruption("shape", detail)] * num_requests
    return [_checked(result) for result in results]


def _checked(result: torch.Tensor) -> torch.Tensor | Corruption:
    if result.ndim == 0 or result.numel() == 0 or not result.is_floating_point():
        return Corruption(
            "shape",
            f"the model gave a tensor of shape {list(result.shape)} and type {result.dtype}; results are "
            "floating tensors with samples",
        )
    result = result.detach().cpu()
    if not bool(torch.isfinite(result).all()):
        return Corruption("samples", "the model gave values that are not finite")
    return result
