"""What a diffusion model is to its runner: a batch in, one tensor per request out. Independent of vLLM."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from omni_server.protocol.corruption import Corruption

DiffusionOutput = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""[num_requests, ...], or one tensor per request in their order, or one per request id."""


@dataclass(frozen=True)
class DiffusionBatch:
    """The requests of one step, in the order in which results are expected."""

    request_ids: tuple[str, ...]
    token_ids: tuple[torch.Tensor, ...]
    """int64 [num_tokens] each, on the CPU."""
    inputs: tuple[bytes, ...]
    """What else the request carries, as its edge encoded it."""

    def select(self, indices: Sequence[int]) -> "DiffusionBatch":
        """The batch of the requests at `indices`."""
        return DiffusionBatch(
            tuple(self.request_ids[i] for i in indices),
            tuple(self.token_ids[i] for i in indices),
            tuple(self.inputs[i] for i in indices),
        )


@runtime_checkable
class SupportsSample(Protocol):
    """A model that runs a whole batch through its solver."""

    def sample(self, batch: DiffusionBatch) -> DiffusionOutput: ...


@runtime_checkable
class SupportsDiffuse(Protocol):
    """The same under its older name."""

    def diffuse(self, batch: DiffusionBatch) -> DiffusionOutput: ...


@runtime_checkable
class SupportsPrepare(Protocol):
    """A model with work to do between loading and the first request, such as compiling kernels."""

    def prepare(self) -> None: ...


Failure = str | Corruption
"""Why a request has no result: a message for the caller, or data that cannot be right."""


class RejectedRequestsError(Exception):
    """Raised by a model that finds requests of a batch invalid before it computes anything.

    `reasons` maps their request ids to what is wrong with them. The rest of the batch is run again without
    them.
    """

    def __init__(self, reasons: Mapping[str, Failure]) -> None:
        super().__init__("; ".join(f"{request_id}: {reason}" for request_id, reason in reasons.items()))
        self.reasons = dict(reasons)


def resolve_generate(model: torch.nn.Module) -> Callable[[DiffusionBatch], DiffusionOutput]:
    """The method that runs a batch: `sample`, else `forward`, else `diffuse`.

    `forward` counts only if a class of the model overrides that of `torch.nn.Module`, which every module has.
    Raises `TypeError` if the model has none of the three.
    """
    if isinstance(model, SupportsSample):
        return model.sample
    if type(model).forward is not torch.nn.Module.forward:
        return model
    if isinstance(model, SupportsDiffuse):
        return model.diffuse
    raise TypeError(
        f"{type(model).__name__} cannot run on the diffusion runner: it has none of sample(batch), forward(batch) "
        "and diffuse(batch)"
    )


def split_output(output: object, batch: DiffusionBatch) -> list[torch.Tensor | Failure]:
    """One entry per request of `batch`, in order: its tensor on the CPU, or why it has no valid one.

    A result must be a floating tensor with at least one dimension, not empty and finite. If the output cannot
    be matched with the requests, none of it is trusted.
    """
    num_requests = len(batch.request_ids)

    def no_match(message: str) -> list[torch.Tensor | Failure]:
        return [Corruption("shape", message)] * num_requests

    entries: list[object]
    match output:
        case torch.Tensor():
            if output.ndim == 0 or len(output) != num_requests:
                return no_match(
                    f"the model answered {num_requests} requests with a tensor {list(output.shape)}"
                )
            entries = list(output)
        case list() | tuple():
            if len(output) != num_requests:
                return no_match(f"the model answered {num_requests} requests with {len(output)} tensors")
            entries = list(output)
        case Mapping():
            unknown = sorted(str(key) for key in output.keys() - set(batch.request_ids))
            if unknown:
                return no_match(f"the model answered unknown requests: {', '.join(unknown)}")
            entries = [output.get(request_id) for request_id in batch.request_ids]
        case _:
            return no_match(f"the model answered with {type(output).__name__}, not with tensors")
    return [_checked(entry) for entry in entries]


def _checked(entry: object) -> torch.Tensor | Failure:
    if entry is None:
        return Corruption("shape", "the model gave no result for this request")
    if not isinstance(entry, torch.Tensor):
        return Corruption("shape", f"the model gave {type(entry).__name__} instead of a tensor")
    if entry.ndim == 0 or entry.numel() == 0:
        return Corruption(
            "shape", f"the model gave a tensor of shape {list(entry.shape)}, which holds no samples"
        )
    if not entry.is_floating_point():
        return Corruption(
            "shape", f"the model gave a tensor of type {entry.dtype}; results are floating tensors"
        )
    result = entry.detach().cpu()
    if not bool(torch.isfinite(result).all()):
        return Corruption("samples", "the model gave values that are not finite")
    return result
