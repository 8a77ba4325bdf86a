"""Who gets the rows that come with tokens."""

from typing import Any, cast

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from omni_server.engine.async_engine import RowOutputProcessor
from omni_server.protocol.rows import InlineBlock, RowsPayload, Segment, SharedBlock, encode
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.block_ledger import BlockLedger
from omni_server.transport.slab_queue import SlabQueue, new_queue_path


def payload(block: InlineBlock | SharedBlock) -> RowsPayload:
    return RowsPayload(1, 1, 2, "float32", block, (Segment(0, 1, 0),))


def output(request_id: str, block: InlineBlock | SharedBlock, *token_ids: int) -> EngineCoreOutput:
    rows = torch.frombuffer(bytearray(encode(payload(block))), dtype=torch.uint8)
    return EngineCoreOutput(request_id=request_id, new_token_ids=list(token_ids), pooling_output=rows)


def processor_with(
    request_id: str, num_predicted: int = 0
) -> tuple[RowOutputProcessor, RequestOutputCollector]:
    """With one request, whose tokens are not detokenised; `request_id` is the caller's, "inside" the
    engine's."""
    made = OutputProcessor(None, log_stats=False, stream_interval=1)
    processor = RowOutputProcessor(made, num_predicted)
    params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA)
    request = EngineCoreRequest(
        request_id="inside",
        external_req_id=request_id,
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "inside")
    processor.add_request(request, None, None, 0, queue)
    return processor, queue


def test_rows_go_to_the_sink_of_their_request_and_tokens_on_to_vllm() -> None:
    processor, queue = processor_with("a")
    taken: list[RowsPayload] = []
    processor.row_sinks["a"] = taken.append
    block = InlineBlock(bytes(8))
    processor.process_outputs([output("inside", block)])
    assert taken == [payload(block)]
    assert queue.output is None, "no token yet: rows of a piece of the prompt"
    processor.process_outputs([output("inside", block, 5)])
    assert taken == [payload(block)] * 2
    assert cast(Any, queue.get_nowait()).outputs[0].token_ids == [5]


def test_rows_of_a_request_that_has_ended_are_given_back_to_the_queue() -> None:
    processor, _ = processor_with("a")
    queue = SlabQueue(QueueSpec(1, str(new_queue_path("test")), 8, 1, 1), create=True)
    try:
        processor.row_ledger = BlockLedger(queue)
        slot, generation = queue.take() or pytest.fail("the queue is empty")
        queue.publish(slot, generation, 1)
        processor.process_outputs([output("gone", SharedBlock(slot, generation, 0))])
        assert queue.num_in_use() == 0
    finally:
        queue.close()


def test_the_processor_is_configured_as_the_one_that_vllm_has_made() -> None:
    made = OutputProcessor(None, log_stats=True, stream_interval=3, tracing_enabled=True)
    ours = RowOutputProcessor(made)
    assert {name: value for name, value in vars(ours).items() if name in vars(made)}.keys() == vars(
        made
    ).keys()
    assert (ours.log_stats, ours.stream_interval, ours.tracing_enabled) == (True, 3, True)


def with_codes(request_id: str, *token_ids: int) -> EngineCoreOutput:
    """Two predicted codes per token, both equal to it."""
    codes = torch.tensor(token_ids, dtype=torch.int16)[:, None].repeat(1, 2)
    return EngineCoreOutput(request_id=request_id, new_token_ids=list(token_ids), pooling_output=codes)


def test_predicted_codes_wait_until_their_tokens_are_taken() -> None:
    processor, queue = processor_with("a", num_predicted=2)
    processor.process_outputs([with_codes("inside", 5)])
    processor.process_outputs([with_codes("inside", 6, 7)])
    assert cast(Any, queue.get_nowait()).outputs[0].token_ids == [5, 6, 7]
    first, rest = processor.take_codes("a", 2), processor.take_codes("a", 3)
    assert first is not None
    assert rest is not None
    assert (first.tolist(), rest.tolist()) == ([[5, 5], [6, 6]], [[7, 7]])


def test_codes_of_a_request_that_has_ended_are_dropped() -> None:
    processor, _ = processor_with("a", num_predicted=2)
    processor.process_outputs([with_codes("gone", 5), with_codes("inside", 6)])
    processor.drop_codes("a")
    taken = processor.take_codes("a", 1)
    assert taken is not None
    assert taken.shape == (0, 2)


def test_a_stage_without_predicted_codes_has_none() -> None:
    processor, _ = processor_with("a")
    assert processor.take_codes("a", 1) is None
