"""Tokens that are kept back until a block of them is complete, in vLLM's own scheduler."""

from pathlib import Path

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.stage_scheduler import StageScheduler
from tests.unit.stages.scheduling import Worker, make_scheduler, request, sending


@pytest.fixture
def talker(tmp_path: Path) -> StageScheduler:
    return make_scheduler(tmp_path)


def tokens_of_steps(worker: Worker, count: int, request_id: str = "a") -> list[list[int] | None]:
    """What the server gets of the request after each step; None: no output of it. Tokens are 0, 1, 2, ..."""
    got: list[list[int] | None] = []
    for token in range(count):
        output = worker.answer(worker.schedule(), token=token).get(request_id)
        got.append(None if output is None else output.new_token_ids)
    return got


def test_tokens_are_sent_when_a_block_of_them_is_complete(talker: StageScheduler) -> None:
    worker = Worker(talker)
    talker.add_request(request("a", 3, None, tokens_per_output=(4,), max_tokens=10))
    assert tokens_of_steps(worker, 10) == [
        None, None, None, [0, 1, 2, 3],
        None, None, None, [4, 5, 6, 7],
        None, [8, 9],
    ]  # fmt: skip
    assert talker.requests == {}


def test_blocks_have_the_sizes_that_were_asked_for_and_then_the_last_one(talker: StageScheduler) -> None:
    worker = Worker(talker)
    talker.add_request(request("a", 3, None, tokens_per_output=(1, 2, 3), max_tokens=10))
    assert tokens_of_steps(worker, 10) == [
        [0],
        None, [1, 2],
        None, None, [3, 4, 5],
        None, None, [6, 7, 8],
        [9],
    ]  # fmt: skip


def test_a_step_without_outputs_sends_no_message(talker: StageScheduler) -> None:
    worker = Worker(talker)
    talker.add_request(request("a", 3, None, tokens_per_output=(2,)))
    assert worker.messages(worker.schedule()) == {}
    assert list(worker.messages(worker.schedule())) == [0]


def test_a_stop_token_ends_a_block_and_comes_with_it(talker: StageScheduler) -> None:
    worker = Worker(talker)
    talker.add_request(request("a", 3, None, tokens_per_output=(4,), stop=1))
    assert tokens_of_steps(worker, 1) == [None]
    output = worker.answer(worker.schedule(), token=1)["a"]
    assert output.new_token_ids == [0, 1]
    assert output.finished


def test_the_first_block_carries_the_statistics_of_the_prompt(talker: StageScheduler) -> None:
    worker = Worker(talker)
    talker.add_request(request("a", 3, None, tokens_per_output=(2,)))
    worker.step()
    output = worker.answer(worker.schedule())["a"]
    assert output.prefill_stats is not None
    assert output.prefill_stats.num_prompt_tokens == 3
    worker.step()
    assert worker.answer(worker.schedule())["a"].prefill_stats is None


def test_tokens_that_were_kept_back_end_with_an_abort(talker: StageScheduler) -> None:
    worker = Worker(talker)
    talker.add_request(request("a", 3, None, tokens_per_output=(4,)))
    assert tokens_of_steps(worker, 2) == [None, None]
    talker.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    talker.add_request(request("a", 3, None, tokens_per_output=(4,)))
    assert tokens_of_steps(worker, 4) == [None, None, None, [0, 1, 2, 3]]


def test_an_abort_during_a_step_that_completes_a_block_sends_nothing(talker: StageScheduler) -> None:
    worker = Worker(talker)
    talker.add_request(request("a", 3, None, tokens_per_output=(2,)))
    worker.step()
    output = worker.schedule()
    talker.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert worker.answer(output) == {}


def test_rows_are_sent_at_once_with_the_tokens_that_were_kept_back(
    thinker: StageScheduler, shared: tuple[QueueSpec, SlabQueue]
) -> None:
    worker = Worker(thinker, shared[1])
    thinker.add_request(sending("a", 3, tokens_per_output=(3,)))
    assert tokens_of_steps(worker, 1) == [None]
    output = worker.answer(worker.schedule(), token=1, senders=frozenset({"a"}))["a"]
    assert output.new_token_ids == [0, 1]
    assert output.pooling_output is not None
    assert worker.answer(worker.schedule(), token=2)["a"].new_token_ids == [2]
    assert tokens_of_steps(worker, 3) == [None, None, [0, 1, 2]]


def test_tokens_that_were_kept_back_end_with_the_corruption_of_a_later_step(talker: StageScheduler) -> None:
    worker = Worker(talker)
    talker.add_request(request("a", 3, None, tokens_per_output=(4,)))
    assert tokens_of_steps(worker, 2) == [None, None]
    output = worker.answer(worker.schedule(), num_nans={"a": 1})["a"]
    assert output.new_token_ids == []
    assert output.finish_reason == FinishReason.ERROR
    assert tokens_of_steps(worker, 1) == [None]


def test_blocks_survive_a_preemption(tmp_path: Path) -> None:
    talker = make_scheduler(tmp_path, num_blocks=4)
    worker = Worker(talker)
    preempted = request("b", 30, None, tokens_per_output=(4,), max_tokens=20)
    talker.add_request(request("a", 30, None, max_tokens=20))
    talker.add_request(preempted)
    sent = [tokens for tokens in tokens_of_steps(worker, 60, "b") if tokens is not None]
    assert preempted.num_preemptions > 0
    assert [len(tokens) for tokens in sent] == [4] * 5
    tokens = [token for block in sent for token in block]
    assert tokens == sorted(set(tokens))


# -- predicted codes


NUM_PREDICTED = 3


@pytest.fixture
def predicting(tmp_path: Path) -> StageScheduler:
    return make_scheduler(tmp_path, num_predicted=NUM_PREDICTED)


def codes_of_steps(worker: Worker, count: int) -> list[list[list[int]] | None]:
    """What the server gets of request "a" after each step: `[n, NUM_PREDICTED]`. Codes equal their token."""
    got: list[list[list[int]] | None] = []
    for token in range(count):
        answer = worker.answer(worker.schedule(), token=token, num_predicted=NUM_PREDICTED)
        output = answer.get("a")
        assert output is None or output.pooling_output is not None
        got.append(None if output is None else output.pooling_output.tolist())
    return got


def test_predicted_codes_are_held_back_with_their_tokens(predicting: StageScheduler) -> None:
    predicting.add_request(request("a", 3, None, tokens_per_output=(2,), max_tokens=5))
    assert codes_of_steps(Worker(predicting), 5) == [
        None, [[0] * 3, [1] * 3],
        None, [[2] * 3, [3] * 3],
        [[4] * 3],
    ]  # fmt: skip


def test_codes_of_a_block_end_with_an_abort(predicting: StageScheduler) -> None:
    worker = Worker(predicting)
    predicting.add_request(request("a", 3, None, tokens_per_output=(4,)))
    assert codes_of_steps(worker, 2) == [None, None]
    predicting.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    predicting.add_request(request("a", 3, None, tokens_per_output=(2,)))
    assert codes_of_steps(worker, 2) == [None, [[0] * 3, [1] * 3]]
