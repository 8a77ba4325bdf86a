"""Joins calls of one denoiser by several requests into one forward pass.

A call is joined with others only if everything that is not per image is the same in all of them. Arguments
are classified by their values alone, for any denoiser whose tensors have the batch first: a tensor with one
entry per image is concatenated, any other value must be equal.
"""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from stages.diffusers.loras import Loras

SHARED = frozenset({"img_ids", "txt_ids", "image_rotary_emb", "rotary_embedding"})
"""Arguments without a batch dimension, even if their first dimension happens to be as long as the batch."""
TEXT, MASK = "encoder_hidden_states", "encoder_hidden_states_mask"
"""Denoisers that take both can be given prompts of different lengths in one batch."""
TIMESTEP = "timestep"


class SharedValues:
    """Identifies the contents of tensors that requests have in common, such as positions.

    Reading a tensor on a GPU waits for the GPU, so a request's tensor is read once: pipelines make such
    tensors once and pass them in every step."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[torch.Tensor, bytes]] = {}

    def digest(self, name: str, tensor: torch.Tensor) -> bytes:
        known = self._known.get(name)
        if known is None or known[0] is not tensor:
            content = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            known = self._known[name] = tensor, hashlib.sha256(content).digest()
        return known[1]


@dataclass(eq=False)
class DenoiserCall:
    """One call of a denoiser, by one request, that waits for its result."""

    forward: Callable[..., Any]
    """The denoiser's own forward pass."""
    arguments: dict[str, Any]
    """By parameter name."""
    batch: int
    """Images in it: 2 for one image with classifier-free guidance, if the pipeline computes both at once."""
    shared: SharedValues
    loras: Loras = ()
    cache_context: Callable[[], AbstractContextManager[Any]] | None = None
    """Enters the request's state of a step cache; such a call is run alone."""
    result: Any = None
    error: Exception | None = field(default=None, init=False)

    def key(self) -> Hashable:
        """Calls with equal keys can be joined. Never equal to another call's if this one must run alone."""
        if self.cache_context is not None:
            return id(self)
        is_padded = MASK in self.arguments
        parts: list[Hashable] = [id(self.forward), self.loras]
        for name, value in sorted(self.arguments.items()):
            if is_padded and name == MASK:
                parts.append(name)
            elif is_padded and name == TEXT:
                parts.append((name, value.dtype, value.shape[2:]))
            else:
                parts.append((name, self._value_key(name, value)))
        return tuple(parts)

    def _value_key(self, name: str, value: object) -> Hashable:
        if isinstance(value, torch.Tensor):
            if name == TIMESTEP and value.ndim == 0:
                return value.dtype, ()
            if self.is_per_image(name, value):
                return value.dtype, value.shape[1:]
            return value.dtype, value.shape, self.shared.digest(name, value)
        if isinstance(value, dict):
            return tuple((key, self._value_key(f"{name}.{key}", item)) for key, item in sorted(value.items()))
        if isinstance(value, list | tuple):
            if self.is_repeated(value):
                value = value[:1]
            return tuple(self._value_key(f"{name}.{index}", item) for index, item in enumerate(value))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return id(self)  # a value whose meaning is not known

    def is_per_image(self, name: str, tensor: torch.Tensor) -> bool:
        is_batched = tensor.ndim > 0 and tensor.shape[0] == self.batch
        return is_batched and name.partition(".")[0] not in SHARED

    def is_repeated(self, values: Sequence[object]) -> bool:
        """A list with one and the same entry per image, such as the images' shapes."""
        plain = all(isinstance(value, int | float | str | list | tuple) for value in values)
        return isinstance(values, list) and plain and values == values[:1] * self.batch


def run_calls(calls: Sequence[DenoiserCall]) -> int:
    """Sets the result of each call, or its error. All calls must have the same key. Returns the number of
    passes: 1, unless the joined pass fails.

    Then the calls are run one by one, so that only those that fail alone have an error. Raises
    `torch.AcceleratorError` if the device is lost.
    """
    if len(calls) > 1:
        try:
            _run_joined(calls)
            return 1
        except torch.AcceleratorError:
            raise
        except Exception:  # noqa: BLE001 - the calls' own errors follow
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    for call in calls:
        try:
            with nullcontext() if call.cache_context is None else call.cache_context():
                call.result = call.forward(**call.arguments)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - raised in the request's thread
            call.error = error
    return len(calls)


def _run_joined(calls: Sequence[DenoiserCall]) -> None:
    arguments = [_padded(call, calls) for call in calls]
    joined = {name: _joined(name, [given[name] for given in arguments], calls) for name in calls[0].arguments}
    result = calls[0].forward(**joined)
    sizes = [call.batch for call in calls]
    if isinstance(result, tuple):
        parts = zip(*(torch.split(value, sizes) for value in result), strict=True)
        for call, part in zip(calls, parts, strict=True):
            call.result = tuple(part)
    else:
        for call, sample in zip(calls, torch.split(result.sample, sizes), strict=True):
            call.result = type(result)(sample=sample)


def _joined(name: str, values: Sequence[Any], calls: Sequence[DenoiserCall]) -> Any:
    first, call = values[0], calls[0]
    if isinstance(first, torch.Tensor):
        if name == TIMESTEP and first.ndim == 0:
            return torch.cat([value.expand(other.batch) for value, other in zip(values, calls, strict=True)])
        return torch.cat(list(values)) if call.is_per_image(name, first) else first
    if isinstance(first, dict):
        return {key: _joined(f"{name}.{key}", [value[key] for value in values], calls) for key in first}
    if isinstance(first, list | tuple):
        if call.is_repeated(first):
            return first[:1] * sum(other.batch for other in calls)
        return type(first)(
            _joined(f"{name}.{index}", items, calls) for index, items in enumerate(zip(*values, strict=True))
        )
    return first


def _padded(call: DenoiserCall, calls: Sequence[DenoiserCall]) -> dict[str, Any]:
    """The call's arguments, with its prompt padded to the longest of `calls` where there is a mask."""
    arguments = call.arguments
    if MASK not in arguments:
        return arguments
    lengths = {other.arguments[TEXT].shape[1] for other in calls}
    if len(lengths) == 1 and all(other.arguments[MASK] is None for other in calls):
        return arguments
    text, mask = arguments[TEXT], arguments[MASK]
    if mask is None:
        mask = torch.ones(text.shape[:2], dtype=torch.long, device=text.device)
    missing = max(lengths) - text.shape[1]
    return arguments | {
        TEXT: torch.nn.functional.pad(text, (0, 0, 0, missing)),
        MASK: torch.nn.functional.pad(mask, (0, missing)),
    }
