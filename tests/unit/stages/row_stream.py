"""A producing stage without an engine: its rows are computed from plain tensors, step by step."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import RowsFeed, RowsInput, RowsOutput, RowsPayload, decode_payload
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SlabQueue, new_queue_path
from stages.runtime.embedding_store import RowStore, StoredRows
from stages.runtime.embeddings_out import RowEmitter
from stages.runtime.stage_step import StepBatch, TakenSlot

WIDTH = 6
MEDIA_TOKEN = 9
VOICES = ("Ada", "Bob")


class FakeProducer:
    """A `RowProducer`: rows are sums, but at media tokens only what the model made of them."""

    hidden_layer: int | None = None

    def __init__(
        self, model: nn.Module | None = None, model_dir: Path = Path(), *, num_boundary: int = 1
    ) -> None:
        self._num_boundary = num_boundary

    def rows(
        self, hidden: torch.Tensor, embeds: torch.Tensor, without_embedding: torch.Tensor | None
    ) -> torch.Tensor:
        if without_embedding is not None:
            embeds = embeds.masked_fill(without_embedding[:, None], 0)
        return hidden + embeds

    def prompt_mask(self, prompt_token_ids: list[int], modalities: Set[str]) -> npt.NDArray[np.bool_] | None:
        return np.array(prompt_token_ids) == MEDIA_TOKEN if modalities else None

    def boundary_rows(self, voice: str) -> torch.Tensor:
        return torch.full((self._num_boundary, WIDTH), 100.0 + VOICES.index(voice))

    def tail_rows(self) -> torch.Tensor:
        return torch.stack([torch.full((WIDTH,), 200.0), torch.full((WIDTH,), 300.0)])


@dataclass
class Spoken:
    """One request of the producing stage, with all that its model will ever compute for it."""

    request_id: str
    prompt: list[int]
    num_generated: int
    voice: str = VOICES[0]
    modalities: frozenset[str] = frozenset()
    dtype: torch.dtype = torch.float32
    seed: int = 0
    next_position: int = 0
    is_given: bool = False
    """The reply is the end of the producer's prompt instead of being sampled."""
    hidden: torch.Tensor = field(init=False)  # [length, WIDTH]
    embeds: torch.Tensor = field(init=False)  # [length, WIDTH]
    positions: torch.Tensor = field(init=False)  # [3, prompt + 1], the last one of text

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        length = len(self.prompt) + self.num_generated
        self.hidden = torch.randn(length, WIDTH, generator=generator).to(self.dtype)
        self.embeds = torch.randn(length, WIDTH, generator=generator).to(self.dtype)
        self.positions = torch.randint(0, 50, (3, len(self.prompt) + 1), generator=generator).float()
        self.positions[:, -1] = 20.5

    @property
    def length(self) -> int:
        return len(self.prompt) + self.num_generated

    def expected_rows(self, *, num_boundary: int = 1) -> torch.Tensor:
        """What the consumer should hold in the end, `[length + num_boundary, WIDTH]`."""
        embeds = self.embeds.clone()
        if self.modalities:
            for position, token in enumerate(self.prompt):
                if token == MEDIA_TOKEN:
                    embeds[position] = 0
        rows = self.hidden + embeds
        boundary = torch.full((num_boundary, WIDTH), 100.0 + VOICES.index(self.voice)).to(self.dtype)
        cut = len(self.prompt)
        return torch.cat([rows[:cut], boundary, rows[cut:]])


class Producer:
    """The emitter with its end of the queue; `step` is one step of the engine."""

    def __init__(self, spec: QueueSpec, queue: SlabQueue | None, *, num_boundary: int = 1) -> None:
        self.emitter = RowEmitter(FakeProducer(num_boundary=num_boundary), spec, torch.device("cpu"))
        self._queue = queue
        self.corrupt: dict[str, Corruption] = {}
        """What was wrong with the rows of the last step, by request."""

    def add(self, sequence: Spoken) -> None:
        reply = [0] * (sequence.num_generated if sequence.is_given else 0)
        output = RowsOutput(voice=sequence.voice, num_reply=len(reply))
        self.emitter.add(
            sequence.request_id, output, sequence.prompt + reply, sequence.modalities, sequence.positions
        )

    def step(self, parts: Sequence[tuple[Spoken, int, int]], *, padding: int = 0) -> dict[str, RowsPayload]:
        """Compute (sequence, first position, count) of each; payloads by request id. `padding` rows
        follow."""
        counts = np.array([count for _, _, count in parts], np.int64)
        batch = StepBatch(
            request_ids=[sequence.request_id for sequence, _, _ in parts],
            first_positions=np.array([first for _, first, _ in parts], np.int64),
            num_tokens=counts,
            offsets=np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
        )
        unused = [torch.full((padding, WIDTH), torch.nan, dtype=parts[0][0].dtype)]
        hidden = torch.cat([s.hidden[first : first + count] for s, first, count in parts] + unused)
        embeds = torch.cat([s.embeds[first : first + count] for s, first, count in parts] + unused)
        slot = None
        if self._queue is not None:
            taken = self._queue.take()
            assert taken is not None
            slot = TakenSlot(*taken)
        pending = self.emitter.emit(batch, hidden, embeds, slot)
        if pending is None:
            return {}
        hidden.fill_(torch.nan)  # as a CUDA graph does with its buffers
        embeds.fill_(torch.nan)
        payloads = {
            request_id: decode_payload(message.numpy().tobytes())
            for request_id, message in zip(batch.request_ids, pending.finish(), strict=True)
            if message is not None
        }
        self.corrupt = pending.corrupt
        return payloads


class Received:
    """One request in a store of its own, as seen by the consumer."""

    def __init__(self, queue: SlabQueue | None = None, consumer: int = 0) -> None:
        self.store = RowStore(() if queue is None else (queue,), consumer)
        self.store.announce("r", RowsInput(num_replaced=0))

    def add(self, feed: RowsFeed) -> None:
        self.store.add("r", feed)

    @property
    def num_rows(self) -> int:
        return len(self._request.rows)

    @property
    def _request(self) -> StoredRows:
        request = self.store.get("r")
        assert request is not None
        return request

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Rows of `count` positions, `[count, width]`."""
        return stored_rows(self.store, "r", first, count)

    def prompt_positions(self, prompt_length: int) -> torch.Tensor | None:
        return self._request.prompt_positions(prompt_length)


def stored_rows(store: RowStore, request_id: str, first: int, count: int) -> torch.Tensor:
    request = store.get(request_id)
    assert request is not None
    return torch.from_numpy(np.stack(request.at(first, count))).view(store.dtype)


def inline_spec() -> QueueSpec:
    return QueueSpec(capacity=1, path=None, slot_bytes=0, max_portions=8, num_consumers=1)


def shared_queue(
    *, capacity: int = 2, slot_bytes: int = 16384, num_consumers: int = 1
) -> tuple[QueueSpec, SlabQueue]:
    spec = QueueSpec(capacity, str(new_queue_path("test-rows")), slot_bytes, 8, num_consumers)
    return spec, SlabQueue(spec, create=True)
