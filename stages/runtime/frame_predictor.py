"""Frames with predicted codebooks: a predictor in the model adds codes to each sampled token, in its step.

The codes are an input of the next step. They are kept on the device, by request and absolute position, so
that decoding, chunked prefill and recomputation after a preemption all read them in the same way.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d

from omni_server.protocol.corruption import Corruption
from stages.runtime.code_sampling import Choose, Chooser, CodeChooser, CodeSampling, Draws, GreedyChooser
from stages.runtime.cuda_graphs import batch_sizes
from stages.runtime.stage_step import StepBatch


@runtime_checkable
class FramePredictor(Protocol):
    """What the model of a stage with predicted codebooks implements.

    `predict` makes no decision on the host, and no row depends on another: a CUDA graph may replay it, with
    the batch padded."""

    num_predicted: int
    """Codes added to each sampled token."""
    code_sampling: CodeSampling
    """The model's own; a stage config may change it (`predictor_sampling`)."""

    def predict(self, hidden: torch.Tensor, sampled: torch.Tensor, choose: Choose) -> torch.Tensor:
        """Codes int64 `[n, num_predicted]` for `sampled` `[n]`, from the hidden states `[n, width]` that the
        tokens were sampled from."""
        ...

    def embed_predicted(self, codes: torch.Tensor) -> torch.Tensor:
        """The sum of the embeddings of `codes` `[n, num_predicted]`: float32 `[n, width]`."""
        ...


# -- prediction


PredictCodes = Callable[[torch.Tensor, torch.Tensor, Draws], torch.Tensor]
"""Takes the hidden states `[n, width]`, the tokens `[n]` that were sampled from them, and how to draw their
codes. Returns the codes, int16 `[n, num_predicted]`; no later call changes them. Rows whose logits had NaN
or infinity are filled with `NO_CODE`."""

NO_CODE = -1


def _chooser(sampling: CodeSampling, draws: Draws) -> Chooser:
    """On the device of `draws`."""
    if sampling.temperature == 0:
        return GreedyChooser(draws)
    if draws.seeds.is_cuda:  # other devices may lack Triton
        from stages.runtime.code_sampling_kernel import MAX_TOP_K, CodeKernel

        if 0 < sampling.top_k <= MAX_TOP_K:
            return CodeKernel(sampling, draws)
    return CodeChooser(sampling, draws)


def predicted_codes(
    predictor: FramePredictor, hidden: torch.Tensor, sampled: torch.Tensor, draws: Draws
) -> torch.Tensor:
    """A `PredictCodes` for one predictor, step by step."""
    choose = _chooser(predictor.code_sampling, draws)
    codes = predictor.predict(hidden, sampled.long(), choose).to(torch.int16)
    return codes.masked_fill(choose.is_broken[:, None], NO_CODE)


# -- history


@dataclass(frozen=True)
class _Request:
    prompt_length: int
    seed: int
    is_greedy: bool


class PendingCodes:
    """The codes of a step's kept tokens on their way to host memory."""

    def __init__(
        self, request_ids: Sequence[str], codes: torch.Tensor, is_kept: npt.NDArray[np.bool_]
    ) -> None:
        """`codes`: int16 `[n, num_predicted]`; `is_kept`: `[n]`."""
        self._request_ids = list(request_ids)
        self._is_kept = is_kept
        self.corrupt: dict[str, Corruption] = {}
        """Requests with `NO_CODE`. Known once `finish` has returned."""
        self._device_codes = codes  # lives until the copy is done
        self._copied: torch.cuda.Event | None = None
        if codes.device.type == "cuda":
            self._codes = torch.empty(codes.shape, dtype=codes.dtype, pin_memory=True)
            self._codes.copy_(codes, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()
        else:
            self._codes = codes

    def finish(self) -> list[torch.Tensor | None]:
        """Waits for the copy. Returns int16 `[1, num_predicted]` per request of the step; None without a
        token."""
        if self._copied is not None:
            self._copied.synchronize()
        for request_id, code, is_kept in zip(
            self._request_ids, self._codes[:, 0].tolist(), self._is_kept, strict=True
        ):
            if is_kept and code == NO_CODE:
                detail = "scores of the codes that are added to the next token are not finite numbers"
                self.corrupt[request_id] = Corruption("logits", detail)
        return [
            self._codes[index : index + 1] if is_kept else None for index, is_kept in enumerate(self._is_kept)
        ]


class CodeHistory:
    """The predicted codes of a stage's requests, and their way through a step of the model runner.

    A request's codes survive its preemption. Codes that belong to no token are never stored among them: vLLM
    samples for every request of a step, but drops the sample if the prompt, or what is computed again after a
    preemption, continues in the next step.

    The device has slots for as many requests as run at once. If more are known, because some of them were
    preempted, a request that is not in the step moves to host memory, until it runs again.
    """

    def __init__(
        self, predictor: FramePredictor, *, max_num_seqs: int, max_model_len: int, device: torch.device
    ) -> None:
        self._predictor = predictor
        self.predict_codes: PredictCodes = partial(predicted_codes, predictor)
        """Replaced by `stages.runtime.predictor_graphs.PredictorGraphs` where graphs are recorded."""
        self._requests: dict[str, _Request] = {}
        self._slots: dict[str, int] = {}
        self._in_host_memory: dict[str, torch.Tensor] = {}
        """Codes of the generated positions, of requests that have lost their slots."""
        self._free = list(range(max_num_seqs, 0, -1))
        # Slot 0 takes what nobody reads. A token sampled at the last position has the index max_model_len.
        self._codes = torch.zeros(
            max_num_seqs + 1, max_model_len + 1, predictor.num_predicted, dtype=torch.int16, device=device
        )
        self._pending: PendingCodes | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str, prompt_length: int, params: SamplingParams) -> None:
        self._requests[request_id] = _Request(
            prompt_length,
            _seed_of(request_id) if params.seed is None else params.seed,
            params.temperature == 0,
        )

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._in_host_memory.pop(request_id, None)
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)

    def _assign_slots(self, batch: StepBatch) -> None:
        """Gives each request of the step a slot."""
        known = [request_id for request_id in batch.request_ids if request_id in self._requests]
        for request_id in [request_id for request_id in known if request_id not in self._slots]:
            if not self._free:
                other = next(other for other in self._slots if other not in known)
                self._in_host_memory[other] = self._generated(other).to("cpu", copy=True)
                self._free.append(self._slots.pop(other))
            self._slots[request_id] = self._free.pop()
            codes = self._in_host_memory.pop(request_id, None)
            if codes is not None:
                self._generated(request_id).copy_(codes)

    def _generated(self, request_id: str) -> torch.Tensor:
        """Its codes on the device."""
        return self._codes[self._slots[request_id], self._requests[request_id].prompt_length :]

    def add_embeddings(self, embeds: torch.Tensor, batch: StepBatch) -> None:
        """Adds the codes' embeddings to the token embeddings at generated positions, in place. `embeds`
        `[>= num_tokens, width]` is the buffer that the model reads."""
        self._assign_slots(batch)
        indices: list[int] = []  # in the flat batch
        slots: list[int] = []
        positions: list[int] = []
        for request_id, first, count, offset in batch.parts():
            request = self._requests.get(request_id)
            if request is None or first + count <= request.prompt_length:
                continue
            generated = range(max(first, request.prompt_length), first + count)
            indices += range(offset + generated.start - first, offset + count)
            slots += [self._slots[request_id]] * len(generated)
            positions += generated
        if not indices:
            return
        where, of_slot, at = async_tensor_h2d(np.array([indices, slots, positions]), embeds.device)
        added = self._predictor.embed_predicted(self._codes[of_slot, at])
        # Added in float32 and rounded once, as where a model sums the embeddings of all codebooks.
        embeds[where] = (embeds[where].float() + added).to(embeds.dtype)

    def predict(
        self,
        hidden: torch.Tensor,
        sampled: torch.Tensor,
        batch: StepBatch,
        is_kept: npt.NDArray[np.bool_],
    ) -> None:
        """Predicts the codes of the step's tokens and starts their copy to host memory; the host never waits.

        `sampled` `[n]` and `hidden` `[n, width]`, which they were sampled from, are on the device; `is_kept`
        `[n]` says which samples become tokens.
        """
        self._assign_slots(batch)
        requests = [self._requests.get(request_id) for request_id in batch.request_ids]
        is_kept = is_kept & np.array([request is not None for request in requests], bool)
        slots = [
            self._slots[request_id] if kept else 0
            for request_id, kept in zip(batch.request_ids, is_kept, strict=True)
        ]
        positions = batch.first_positions + batch.num_tokens
        is_greedy = [request is None or request.is_greedy for request in requests]
        seeds = [0 if request is None else request.seed for request in requests]
        of_slot, at, *others = async_tensor_h2d(
            np.array([slots, positions, seeds, is_greedy], np.int64), hidden.device
        )
        codes = self.predict_codes(hidden, sampled, Draws(at, *others))
        # The request ends, but its next step may have been scheduled already, and looks them up.
        self._codes[of_slot, at] = codes.clamp(min=0)
        self._pending = PendingCodes(batch.request_ids, codes, is_kept)

    def warm_up(self, hidden: torch.Tensor) -> None:
        """Predicts codes that nobody reads, so that all kernels are compiled before the first request.
        `hidden` `[max_num_seqs, width]`: zeros in the type and on the device of the hidden states."""
        for size in batch_sizes(len(hidden)):
            batch = StepBatch([""] * size, *np.zeros((3, size), np.int64))
            sampled = hidden.new_zeros(size, dtype=torch.int64)
            self.predict(hidden[:size], sampled, batch, np.zeros(size, np.bool_))
        self.take()

    def take(self) -> PendingCodes | None:
        """The codes of the last `predict`, once."""
        pending, self._pending = self._pending, None
        return pending


def _seed_of(request_id: str) -> int:
    """For a request without a seed: the same on every tensor-parallel rank, which all predict the codes."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def frame_predictor(model: Any, num_predicted: int) -> FramePredictor:
    """`model` as a predictor. Raises `TypeError` if it is none, or predicts another number of codes."""
    if not isinstance(model, FramePredictor):
        raise TypeError(f"{type(model).__name__} predicts no codes: it does not implement FramePredictor")
    if model.num_predicted != num_predicted:
        raise TypeError(
            f"{type(model).__name__} predicts {model.num_predicted} codes per token, but the pipeline says "
            f"{num_predicted}"
        )
    return model
