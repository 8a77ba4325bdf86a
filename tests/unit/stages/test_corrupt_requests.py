"""Requests whose data cannot be right are ended by vLLM's own scheduler, each alone."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import RequestStatus

from omni_server.protocol.corruption import Corruption, decode_corruption
from omni_server.protocol.rows import InlineBlock, RowsFeed, RowsPayload
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.stage_scheduler import AsyncStageScheduler, StageScheduler
from tests.unit.stages.scheduling import Worker, consume, fed, feed, make_scheduler, request, rows, sending

PROMPT = 6


def ends(outputs: Mapping[str, EngineCoreOutput]) -> dict[str, tuple[str, str]]:
    """Of the requests that ended with an error, the kind of what was corrupt and what is said of it."""
    found = {}
    for request_id, output in outputs.items():
        if output.finish_reason == FinishReason.ERROR:
            assert isinstance(output.stop_reason, str)
            corruption = decode_corruption(output.stop_reason)
            assert corruption is not None
            assert output.new_token_ids == []
            found[request_id] = (corruption.kind, corruption.detail)
    return found


@pytest.mark.parametrize(
    ("spans", "final", "detail"),
    [
        ([(PROMPT + 1, 1)], None, f"rows from position {PROMPT + 1}, but {PROMPT} rows were received"),
        ([(PROMPT - 1, 2)], None, f"rows from position {PROMPT - 1}, but {PROMPT} rows were received"),
        (
            [(PROMPT, 1), (PROMPT, 1)],
            None,
            f"rows from position {PROMPT}, but {PROMPT + 1} rows were received",
        ),
        ([], PROMPT + 1, f"received {PROMPT} of {PROMPT + 1} rows"),
    ],
    ids=["missing", "overlapping", "twice", "missing at the end"],
)
def test_rows_out_of_order_end_their_request_with_the_next_message_and_no_other(
    talker: StageScheduler,
    shared: tuple[QueueSpec, SlabQueue],
    spans: list[tuple[int, int]],
    final: int | None,
    detail: str,
) -> None:
    worker, queue = Worker(talker), shared[1]
    for request_id in ("broken", "fine"):
        talker.add_request(fed(request_id, PROMPT, max_tokens=3))
        talker.add_request(feed(request_id, rows(queue, 0, PROMPT)))
        worker.step()
        consume(worker, queue)
    for first, count in spans:
        talker.add_request(feed("broken", rows(queue, first, count)))
    if final is not None:
        talker.add_request(feed("broken", RowsFeed(final_length=final)))
    assert talker.has_requests()  # although nobody can be computed
    output = worker.schedule()
    consume(worker, queue)
    assert "broken" not in output.num_scheduled_tokens
    assert ends(worker.answer(output)) == {"broken": ("row_sequence", detail)}
    assert list(talker.requests) == ["fine"]
    assert queue.num_in_use() == 0
    talker.add_request(feed("fine", RowsFeed(final_length=PROMPT)))
    assert worker.step() == {"fine": 1}


def test_a_message_without_rows_ends_its_request(talker: StageScheduler) -> None:
    worker = Worker(talker)
    talker.add_request(fed("a", PROMPT))
    talker.add_request(feed("a", RowsFeed(RowsPayload(4, 0, 2, "float32", InlineBlock(b""), ()))))
    assert ends(worker.answer(worker.schedule())) == {"a": ("row_sequence", "a message without rows")}
    assert not talker.has_unfinished_requests()


def test_a_request_that_ends_before_it_is_told_of_its_rows_ends_once(
    talker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker = Worker(talker)
    talker.add_request(fed("a", PROMPT))
    talker.add_request(feed("a", rows(shared[1], 1, 1)))
    talker.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert worker.answer(worker.schedule()) == {}
    assert not talker.has_requests()


def test_predicted_codes_are_not_blamed_for_the_logits_of_their_token(
    thinker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker = Worker(thinker, shared[1])
    for request_id in ("token", "codes"):
        thinker.add_request(sending(request_id, PROMPT))
    outputs = worker.answer(
        worker.schedule(),
        num_nans={"token": 3, "codes": 0},
        findings={name: Corruption("logits", "predicted codes") for name in ("token", "codes")},
    )
    assert ends(outputs) == {
        "token": ("logits", "3 of the next token's scores are not finite numbers"),
        "codes": ("logits", "predicted codes"),
    }


@pytest.mark.parametrize("scheduler_class", [StageScheduler, AsyncStageScheduler])
def test_what_a_step_found_corrupt_ends_those_requests_without_their_token(
    tmp_path: Path, shared: tuple[QueueSpec, SlabQueue], scheduler_class: type[StageScheduler]
) -> None:
    spec, queue = shared
    thinker = make_scheduler(tmp_path, output_queue=spec, scheduler_class=scheduler_class)
    worker = Worker(thinker, queue)
    senders = frozenset(["rows", "logits", "both", "fine"])
    for request_id in senders:
        thinker.add_request(sending(request_id, PROMPT))
    output = worker.schedule()
    outputs = worker.answer(
        output,
        senders=senders,
        num_nans={"rows": 0, "logits": 3, "both": 2, "fine": 0, "gone": 5},
        findings={name: Corruption("rows", "NaN") for name in ("rows", "both", "gone")},
    )
    told = {request_id: kind for request_id, (kind, _) in ends(outputs).items()}
    assert told == {"rows": "rows", "logits": "logits", "both": "rows"}
    assert list(thinker.requests) == ["fine"]
    assert outputs["fine"].pooling_output is not None
    assert queue.num_in_use() == 1  # that of the request that goes on, which the server has now
    assert queue.published_blocks() != []
    assert sum(queue.is_open(block) for block in queue.published_blocks()) == 1


def test_nobody_finds_the_prompt_of_a_corrupt_request_in_the_prefix_cache(thinker: StageScheduler) -> None:
    """vLLM keeps whole blocks of 32 tokens; the prompts are the same."""
    worker = Worker(thinker)
    thinker.add_request(request("first", 70, None, max_tokens=1))
    worker.step()
    thinker.add_request(request("second", 70, None))
    output = worker.schedule()
    assert output.num_scheduled_tokens == {"second": 70 - 64}
    worker.answer(output, num_nans={"second": 1})
    thinker.add_request(request("third", 70, None))
    assert worker.step() == {"third": 70}
