"""Requests that send or receive rows, in vLLM's own scheduler."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.v1.request import Request, RequestStatus

from omni_server.protocol.rows import RowsFeed, RowsOutput, SharedBlock, SourceSpan, TextSegment
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime import stage_scheduler
from stages.runtime.stage_scheduler import AsyncStageScheduler, StageScheduler
from tests.unit.stages.scheduling import (
    AnyScheduler,
    Worker,
    consume,
    fed,
    feed,
    feeds,
    make_scheduler,
    request,
    rows,
    sending,
)

PROMPT = 6


# -- rows in


def test_a_request_is_held_back_until_the_rows_of_its_prompt_are_there(
    talker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue = Worker(talker), shared[1]
    talker.add_request(fed("a", PROMPT))
    assert worker.step() == {}
    talker.add_request(feed("a", rows(queue, 0, PROMPT - 1)))
    assert worker.step() == {}
    consume(worker, queue)
    talker.add_request(feed("a", rows(queue, PROMPT - 1, 1)))
    assert worker.step() == {"a": PROMPT}


def test_the_last_feed_lets_a_request_run_to_its_end(
    talker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue = Worker(talker), shared[1]
    talker.add_request(fed("a", PROMPT, max_tokens=9))
    talker.add_request(feed("a", rows(queue, 0, PROMPT)))
    worker.step()
    assert worker.step() == {}
    talker.add_request(feed("a", RowsFeed(final_length=PROMPT)))
    for _ in range(8):
        assert worker.step() == {"a": 1}
    assert talker.requests == {}


def test_rows_that_may_not_be_spoken_yet_hold_the_request_back(
    talker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue = Worker(talker), shared[1]
    talker.add_request(fed("a", PROMPT))
    talker.add_request(feed("a", rows(queue, 0, PROMPT + 3, num_released=PROMPT - 1)))
    assert worker.step() == {}
    talker.add_request(feed("a", RowsFeed(num_released=PROMPT + 1)))
    assert worker.step() == {"a": PROMPT}
    assert worker.step() == {"a": 1}
    assert worker.step() == {}
    talker.add_request(feed("a", RowsFeed(final_length=PROMPT + 1)))
    assert worker.step() == {"a": 1}


def test_a_prompt_in_chunks_begins_only_when_all_its_rows_are_there(
    tmp_path: Path, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    talker, queue = make_scheduler(tmp_path, input_queue=shared[0], max_num_batched_tokens=40), shared[1]
    worker = Worker(talker)
    talker.add_request(fed("a", 100))
    talker.add_request(feed("a", rows(queue, 0, 99)))
    assert worker.step() == {}
    consume(worker, queue)
    talker.add_request(feed("a", rows(queue, 99, 1)))
    assert [worker.step() for _ in range(4)] == [{"a": 40}, {"a": 40}, {"a": 20}, {}]


def test_feeds_travel_to_the_worker_once_and_in_order_also_when_nothing_runs(
    talker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue = Worker(talker), shared[1]
    talker.add_request(fed("a", PROMPT))
    feeds = [rows(queue, 0, 2), rows(queue, 2, 1)]
    for message in feeds:
        talker.add_request(feed("a", message))
    worker.step()
    worker.step()
    assert worker.steps[0].feeds == (("a", feeds[0]), ("a", feeds[1]))
    assert worker.steps[1].feeds == ()


def test_a_feed_for_a_request_that_has_ended_is_dropped_and_starts_no_new_one(
    talker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue = Worker(talker), shared[1]
    talker.add_request(fed("a", PROMPT, max_tokens=1))
    talker.add_request(feed("a", rows(queue, 0, PROMPT)))
    worker.step()
    consume(worker, queue)
    assert talker.requests == {}
    talker.add_request(feed("a", rows(queue, PROMPT, 1)))
    talker.add_request(feed("a", RowsFeed(final_length=PROMPT + 1)))
    talker.add_request(feed("never seen", rows(queue, 0, 1)))
    assert queue.num_in_use() == 0
    assert talker.requests == {}
    assert worker.step() == {}
    assert worker.steps[-1].feeds == ()


def test_one_message_feeds_several_requests_in_order_and_drops_what_is_late(
    talker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue = Worker(talker), shared[1]
    talker.add_request(fed("a", PROMPT))
    talker.add_request(fed("b", PROMPT))
    first, late = rows(queue, 0, PROMPT), rows(queue, 0, 3)
    end, limit = RowsFeed(final_length=PROMPT), RowsFeed(num_released=1)
    talker.add_request(feeds(("a", first), ("has ended", late), ("b", limit), ("a", end)))
    assert set(talker.requests) == {"a", "b"}, "the message is no request"
    assert queue.num_in_use() == 1
    worker.step()
    assert worker.steps[-1].feeds == (("a", first), ("b", limit), ("a", end))


def test_an_abort_while_held_back_drops_the_feeds_that_have_not_left_yet(
    talker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue = Worker(talker), shared[1]
    talker.add_request(fed("a", PROMPT))
    talker.add_request(fed("b", PROMPT))
    talker.add_request(feed("a", rows(queue, 0, 2)))
    kept = rows(queue, 0, 3)
    talker.add_request(feed("b", kept))
    assert queue.num_in_use() == 2
    talker.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert queue.num_in_use() == 1
    output = worker.schedule()
    assert output.finished_req_ids == {"a"}, "the worker has to forget it"
    assert worker.steps[-1].feeds == (("b", kept),)


def test_rows_the_worker_was_given_are_not_dropped_again(
    talker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue = Worker(talker), shared[1]
    talker.add_request(fed("a", PROMPT))
    talker.add_request(feed("a", rows(queue, 0, 2)))
    worker.step()
    talker.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert queue.num_in_use() == 1, "the worker may still be copying"
    consume(worker, queue)
    assert queue.num_in_use() == 0


def test_the_engine_may_sleep_while_all_requests_are_held_back(
    talker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue = Worker(talker), shared[1]
    assert not talker.has_requests()
    talker.add_request(fed("waiting", PROMPT))
    talker.add_request(fed("running", PROMPT))
    talker.add_request(feed("running", rows(queue, 0, PROMPT)))
    assert talker.has_requests()
    worker.step()
    assert not talker.has_requests()
    talker.add_request(feed("waiting", rows(queue, 0, 1)))
    assert talker.has_requests(), "the worker has to copy the rows, or the queue stays full"
    worker.step()
    assert not talker.has_requests()
    talker.finish_requests("waiting", RequestStatus.FINISHED_ABORTED)
    assert talker.has_requests(), "the worker has to be told of the end"
    worker.step()
    assert not talker.has_requests()
    talker.add_request(request("free", 3, None))
    assert talker.has_requests()


def test_a_preempted_request_is_taken_up_again_with_the_rows_it_has(
    tmp_path: Path, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    # Three blocks of 32 tokens; one of them is vLLM's null block.
    talker, queue = make_scheduler(tmp_path, input_queue=shared[0], num_blocks=3), shared[1]
    worker = Worker(talker)
    for name in "ab":
        talker.add_request(fed(name, 31))
        talker.add_request(feed(name, rows(queue, 0, 31)))
    assert worker.step() == {"a": 31, "b": 31}
    consume(worker, queue)
    talker.add_request(feed("a", rows(queue, 31, 10)))
    assert worker.step() == {"a": 1}
    talker.add_request(feed("b", RowsFeed(final_length=31)))
    worker.step()
    assert talker.requests["b"].num_preemptions == 1
    talker.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert worker.step() == {"b": 32}


@pytest.mark.parametrize(
    ("reads_text", "held_s", "is_preempted"), [(True, 0.3, True), (True, 0.1, False), (False, 0.3, False)]
)
@pytest.mark.parametrize("limit", [{"max_num_seqs": 1}, {"num_blocks": 2}])
def test_a_request_whose_text_has_not_gone_on_gives_its_seat_and_its_blocks_to_one_that_may_run(
    tmp_path: Path,
    shared: tuple[QueueSpec, SlabQueue],
    monkeypatch: pytest.MonkeyPatch,
    *,
    reads_text: bool,
    held_s: float,
    is_preempted: bool,
    limit: dict[str, int],
) -> None:
    now = 100.0
    monkeypatch.setattr(stage_scheduler, "time", SimpleNamespace(monotonic=lambda: now))
    source = None if reads_text else shared[0]
    talker = make_scheduler(tmp_path, input_queue=source, reads_text=reads_text, **limit)
    worker = Worker(talker)
    talker.add_request(fed("held", 5))
    talker.add_request(feed("held", RowsFeed(text=(TextSegment(0, (1, 2, 3, 4, 5)),))))
    assert worker.step() == {"held": 5}
    assert not talker.has_requests(), "the engine makes no step while it waits"
    now += held_s
    talker.add_request(request("ready", 3, None))
    assert worker.step() == ({"ready": 3} if is_preempted else {})
    talker.finish_requests("ready", RequestStatus.FINISHED_ABORTED)
    talker.add_request(feed("held", RowsFeed(final_length=5)))
    assert worker.step() == {"held": 6 if is_preempted else 1}


def test_a_request_whose_text_does_not_go_on_keeps_what_no_other_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_scheduler, "MAX_HOLD_S", 0.0)
    talker = make_scheduler(tmp_path, reads_text=True, max_num_seqs=2)
    worker = Worker(talker)
    talker.add_request(fed("held", 5))
    talker.add_request(feed("held", RowsFeed(text=(TextSegment(0, (1, 2, 3, 4, 5)),))))
    worker.step()
    talker.add_request(request("other", 3, None))
    assert [worker.step() for _ in range(2)] == [{"other": 3}, {"other": 1}]
    assert talker.requests["held"].num_preemptions == 0


def test_a_request_that_grows_takes_the_blocks_of_one_whose_text_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_scheduler, "MAX_HOLD_S", 0.0)
    talker = make_scheduler(tmp_path, reads_text=True, num_blocks=3)
    worker = Worker(talker)
    talker.add_request(fed("held", 5))
    talker.add_request(feed("held", RowsFeed(text=(TextSegment(0, (1, 2, 3, 4, 5)),))))
    talker.add_request(request("grows", 31, None))
    assert [worker.step() for _ in range(3)] == [{"held": 5, "grows": 31}, {"grows": 1}, {"grows": 1}]
    assert talker.requests["grows"].num_preemptions == 0


# -- rows out


def test_a_request_that_sends_rows_computes_its_whole_prompt(
    thinker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    """Every second one finds its prompt in the prefix cache, which holds no rows."""
    worker = Worker(thinker, shared[1])
    thinker.add_request(request("text", 65, None, max_tokens=1))
    assert worker.step() == {"text": 65}
    thinker.add_request(sending("speech", 65))
    assert thinker.requests["speech"].skip_reading_prefix_cache
    thinker.add_request(request("text again", 65, None))
    assert not thinker.requests["text again"].skip_reading_prefix_cache
    assert worker.step()["speech"] == 65


def sending_media(request_id: str, prompt_length: int, *, media: int) -> Request:
    """A thinker's request of which one row is wanted, that of position `media`."""
    spans = SourceSpan(0, 0, media, has_rows=False), SourceSpan(media, media, 1, has_rows=True)
    return request(request_id, prompt_length, RowsOutput(voice="Ada", spans=spans))


def test_steps_behind_the_last_media_take_no_slot(
    thinker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue = Worker(thinker, shared[1]), shared[1]
    thinker.add_request(sending_media("a", PROMPT, media=2))
    worker.step()
    assert worker.steps[-1].slot is not None
    assert queue.num_in_use() == 0
    worker.step()
    assert worker.steps[-1].slot is None


def test_a_full_queue_does_not_hold_back_a_request_whose_rows_have_all_been_sent(
    thinker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue = Worker(thinker, shared[1]), shared[1]
    thinker.add_request(sending_media("old", PROMPT, media=2))
    worker.step()
    thinker.add_request(sending("speech", 3))
    for _ in range(queue.capacity):
        worker.answer(worker.schedule(), senders=frozenset({"speech"}))
    assert queue.num_in_use() == queue.capacity
    thinker.add_request(sending_media("new", PROMPT, media=2))
    assert worker.step() == {"old": 1}


def test_a_full_queue_holds_back_only_requests_that_send_rows(
    thinker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue = Worker(thinker, shared[1]), shared[1]
    thinker.add_request(sending("speech", 3))
    thinker.add_request(request("text", 3, None))
    for _ in range(queue.capacity):
        output = worker.schedule()
        assert set(output.num_scheduled_tokens) == {"speech", "text"}
        worker.answer(output, senders=frozenset({"speech"}))
    assert queue.num_in_use() == queue.capacity
    thinker.add_request(sending("new speech", 3))
    for _ in range(3):
        assert worker.step() == {"text": 1}
        assert thinker.has_requests(), "nothing would wake the engine"
    slot = worker.steps[0].slot
    assert slot is not None
    queue.finish_all(SharedBlock(slot.slot, slot.generation, 0))
    assert worker.step() == {"speech": 1, "text": 1, "new speech": 3}


def test_rows_of_a_request_that_ended_during_the_step_are_ended(
    thinker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue = Worker(thinker, shared[1]), shared[1]
    thinker.add_request(sending("stays", 3))
    thinker.add_request(sending("leaves", 3))
    output = worker.schedule()
    thinker.finish_requests("leaves", RequestStatus.FINISHED_ABORTED)
    delivered = worker.answer(output, senders=frozenset({"stays", "leaves"}))
    assert set(delivered) == {"stays"}
    assert delivered["stays"].pooling_output is not None
    slot = worker.steps[-1].slot
    assert slot is not None
    assert queue.num_in_use() == 1
    queue.finish(SharedBlock(slot.slot, slot.generation, 0), 0)
    assert queue.num_in_use() == 0


# -- async scheduling: a step is scheduled before the one before it has been answered


@pytest.fixture
def async_thinker(tmp_path: Path, shared: tuple[QueueSpec, SlabQueue]) -> AnyScheduler:
    return make_scheduler(tmp_path, output_queue=shared[0], scheduler_class=AsyncStageScheduler)


def test_the_rows_of_the_extra_step_after_a_stop_token_are_ended(
    async_thinker: AnyScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker, queue, senders = Worker(async_thinker, shared[1]), shared[1], frozenset({"speech"})
    async_thinker.add_request(sending("speech", 3, stop=42))
    first = worker.schedule()
    extra = worker.schedule()
    assert extra.num_scheduled_tokens == {"speech": 1}
    delivered = worker.answer(first, token=42, senders=senders)
    assert delivered["speech"].finish_reason is not None
    assert worker.answer(extra, senders=senders) == {}
    slot = worker.steps[0].slot
    assert slot is not None
    queue.finish_all(SharedBlock(slot.slot, slot.generation, 0))
    assert queue.num_in_use() == 0


def test_a_fed_request_does_not_run_ahead_of_its_rows(
    tmp_path: Path, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    talker = make_scheduler(tmp_path, input_queue=shared[0], scheduler_class=AsyncStageScheduler)
    worker, queue = Worker(talker), shared[1]
    talker.add_request(fed("a", PROMPT))
    talker.add_request(feed("a", rows(queue, 0, PROMPT + 1)))
    first, second = worker.schedule(), worker.schedule()
    assert first.num_scheduled_tokens == {"a": PROMPT}
    assert second.num_scheduled_tokens == {"a": 1}
    third = worker.schedule()  # position PROMPT + 1 has no row yet
    assert third.num_scheduled_tokens == {}
    assert not talker.has_requests()
    worker.answer(first)
    worker.answer(second)
    assert worker.schedule().num_scheduled_tokens == {}
    talker.add_request(feed("a", RowsFeed(final_length=PROMPT + 1)))
    assert worker.schedule().num_scheduled_tokens == {"a": 1}


def test_a_scheduler_without_our_config_refuses_to_start(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path)
    scheduler.vllm_config.additional_config = {}
    with pytest.raises(TypeError, match="StageRuntimeConfig"):
        StageScheduler(
            vllm_config=scheduler.vllm_config,
            kv_cache_config=scheduler.kv_cache_config,
            structured_output_manager=scheduler.structured_output_manager,
            block_size=scheduler.block_size,
        )
