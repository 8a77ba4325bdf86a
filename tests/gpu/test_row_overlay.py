"""What only a GPU shows about rows in: copies that run beside the host.

`pytest -m gpu tests/gpu/test_row_overlay.py`
"""

import numpy as np
import pytest
import torch

from omni_server.protocol.rows import RowsFeed, RowsInput, RowsOutput, decode_payload
from stages.runtime.embeddings_in import RowOverlay, RowUpload
from stages.runtime.embeddings_out import RowEmitter
from stages.runtime.stage_step import StepBatch, TakenSlot
from tests.unit.stages.row_stream import WIDTH, FakeProducer, shared_queue
from tests.unit.stages.test_embedding_store import TAIL, numbered, payload

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def batch(*parts: tuple[str, int, int]) -> StepBatch:
    """(request id, first position, count) of each request, one behind the other."""
    counts = np.array([count for _, _, count in parts], np.int32)
    return StepBatch(
        [request_id for request_id, _, _ in parts],
        np.array([first for _, first, _ in parts], np.int32),
        counts,
        (np.cumsum(counts) - counts).astype(np.int32),
    )


def keep_busy() -> None:
    """Some tens of milliseconds of work in the current stream: the host gets ahead of it."""
    torch.cuda._sleep(100_000_000)


def test_a_staging_buffer_is_not_overwritten_while_it_is_read() -> None:
    """Twenty uploads behind a device that is busy; each result is taken in stream order."""
    rows = (np.arange(64 * 20) % 256).astype(np.uint8).reshape(-1, 1).repeat(7168, 1)
    upload, taken = RowUpload(), []
    for step in range(20):
        keep_busy()
        taken.append(upload.upload(list(rows[64 * step : 64 * (step + 1)]), CUDA).clone())
    for step, result in enumerate(taken):
        assert torch.equal(result.cpu(), torch.from_numpy(rows[64 * step : 64 * (step + 1)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_overlay_does_on_the_device_what_it_does_on_the_host(dtype: torch.dtype) -> None:
    """Prefill in chunks, decoding, tail rows and requests that are not fed, the device lagging behind all the
    time."""
    random = np.random.default_rng(0)
    on_host, on_device = RowOverlay((), 0), RowOverlay((), 0)  # an overlay has one device
    for overlay in (on_host, on_device):
        for number, name in enumerate("abcdef"):
            overlay.feed(name, RowsFeed(payload(0, numbered(0, 30) + 1000 * number, tail=TAIL)))
            overlay.feed(name, RowsFeed(final_length=30))
            overlay.announce(name, RowsInput(num_replaced=12))
    pairs = []
    for _ in range(60):
        names = [str(name) for name in random.permutation(list("abcdefXY"))[: random.integers(1, 9)]]
        is_decode = random.random() < 0.5
        parts = [
            (name, int(random.integers(0, 40)), 1 if is_decode else int(random.integers(1, 9)))
            for name in names
        ]
        step = batch(*parts)
        host = torch.randn(step.total_tokens + 3, 2).to(dtype)
        device = host.to(CUDA)
        keep_busy()
        on_host.apply(host, step)
        on_device.apply(device, step)
        pairs.append((host, device))
    for host, device in pairs:
        assert torch.equal(host, device.cpu())


def test_rows_leave_as_they_were_when_the_step_was_computed() -> None:
    """Static buffers are overwritten by the next step while the copy to the host is still under way."""
    spec, queue = shared_queue(capacity=4)
    try:
        emitter = RowEmitter(FakeProducer(), spec, CUDA)
        for name in "ab":
            emitter.add(name, RowsOutput(voice="Ada"), [1, 2], frozenset(), None)
        overlay = RowOverlay((spec,), 0)
        hidden, embeds = torch.zeros(4, WIDTH, device=CUDA), torch.zeros(4, WIDTH, device=CUDA)
        pending = []
        for step, parts in enumerate(
            [[("a", 0, 2), ("b", 0, 2)], [("b", 2, 1), ("a", 2, 1)], [("a", 3, 1), ("b", 3, 1)]]
        ):
            keep_busy()
            hidden.copy_(torch.arange(4.0, device=CUDA)[:, None] + 10 * step)
            taken = queue.take()
            assert taken is not None
            pending.append((parts, emitter.emit(batch(*parts), hidden, embeds, TakenSlot(*taken))))
            hidden.fill_(torch.nan)
        for parts, step_rows in pending:
            assert step_rows is not None
            for (name, _, _), message in zip(parts, step_rows.finish(), strict=True):
                assert message is not None
                overlay.feed(name, RowsFeed(decode_payload(message.numpy().tobytes())))
        for name, want in (("a", [0, 1, 100, 11, 20]), ("b", [2, 3, 100, 10, 21])):
            rows = torch.zeros(5, WIDTH, device=CUDA)
            overlay.apply(rows, batch((name, 0, 5)))
            assert rows[:, 0].tolist() == want
        assert queue.num_in_use() == 0
    finally:
        queue.close()
