"""vLLM's scheduler with our mixin, on a tiny text model's config; the test plays the worker."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import (
    FEEDS_KEY,
    FEEDS_REQUEST_ID,
    REQUEST_KEY,
    AddressedFeed,
    RowsFeed,
    RowsInput,
    RowsOutput,
    RowsPayload,
    RowsRequest,
    Segment,
    SharedBlock,
    encode,
    encode_feeds,
)
from omni_server.protocol.runtime_config import QueueSpec, StageRuntimeConfig
from omni_server.protocol.vllm_fields import TOKENS_PER_OUTPUT_KEY
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.batching_delay import BatchingDelay
from stages.runtime.stage_scheduler import AsyncStageScheduler, StageScheduler
from stages.runtime.stage_step import StageStep, attach_findings, attached_step

AnyScheduler = StageScheduler | AsyncStageScheduler

BLOCK_SIZE = 32

OWN_DELAY = BatchingDelay(0, 0)
"""Leaves a stage the delay that it has."""

init_none_hash(sha256)
_block_hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
TEXT_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


def make_scheduler(
    folder: Path,
    *,
    input_queue: QueueSpec | None = None,
    output_queue: QueueSpec | None = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 256,
    num_blocks: int = 200,
    scheduler_class: type[StageScheduler] | type[AsyncStageScheduler] = StageScheduler,
    batching_delay: BatchingDelay | None = None,
    kv_transfer_config: KVTransferConfig | None = None,
    num_predicted: int = 0,
    reads_text: bool = False,
) -> AnyScheduler:
    """`batching_delay`: in place of the stage's own, which depends on the clock; None for none at all."""
    (folder / "config.json").write_text(json.dumps(TEXT_MODEL))
    model = ModelConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        seed=0,
        trust_remote_code=False,
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=512,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=kv_transfer_config,
        additional_config=StageRuntimeConfig(
            model_dir=str(folder),
            input_queues=() if input_queue is None else (input_queue,),
            output_queue=output_queue,
            num_predicted=num_predicted,
            row_table=reads_text,
        ),
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],  # memory, which nobody asks for here
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    scheduler = scheduler_class(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )
    if batching_delay is not OWN_DELAY:
        scheduler.batching_delay = batching_delay
    return scheduler


def request(
    request_id: str,
    prompt_length: int,
    rows: RowsRequest | None,
    *,
    max_tokens: int = 50,
    stop: int | None = None,
    tokens_per_output: Sequence[int] = (),
) -> Request:
    extra: dict[str, bytes | Sequence[int]] = {} if rows is None else {REQUEST_KEY: encode(rows)}
    if tokens_per_output:
        extra[TOKENS_PER_OUTPUT_KEY] = tokens_per_output
    params = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        stop_token_ids=None if stop is None else [stop],
        extra_args=extra,
    )
    return Request(request_id, list(range(prompt_length)), params, None, block_hasher=_block_hasher)


def fed(request_id: str, prompt_length: int, **kwargs: int) -> Request:
    """A talker's request."""
    return request(request_id, prompt_length, RowsInput(num_replaced=prompt_length), **kwargs)


def sending(request_id: str, prompt_length: int, **kwargs: Any) -> Request:
    """A thinker's request whose rows are wanted."""
    return request(request_id, prompt_length, RowsOutput(voice="Ada"), **kwargs)


def feed(request_id: str, feed: RowsFeed) -> Request:
    """Rows as they arrive: inside a request that is none."""
    return feeds((request_id, feed))


def feeds(*addressed: AddressedFeed) -> Request:
    """Rows of several requests in one message."""
    params = SamplingParams(max_tokens=1, extra_args={FEEDS_KEY: encode_feeds(addressed)})
    return Request(FEEDS_REQUEST_ID, [0], params, None)


def rows_payload(block: SharedBlock, first: int, count: int) -> RowsPayload:
    return RowsPayload(
        prompt_length=4,
        num_generated_rows=0,
        width=2,
        dtype="float32",
        block=block,
        segments=(Segment(first, count, 0),),
    )


class Worker:
    """Computes nothing, but answers each step as a worker does."""

    def __init__(self, scheduler: AnyScheduler, output_queue: SlabQueue | None = None) -> None:
        self.scheduler = scheduler
        self._output_queue = output_queue
        self.steps: list[StageStep] = []

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.steps.append(attached_step(output))
        return output

    def answer(self, output: SchedulerOutput, **answer: Any) -> dict[str, EngineCoreOutput]:
        """The outputs of `messages`, by request."""
        groups = self.messages(output, **answer)
        return {one.request_id: one for group in groups.values() for one in group.outputs}

    def messages(
        self,
        output: SchedulerOutput,
        *,
        token: int = 7,
        senders: frozenset[str] = frozenset(),
        num_nans: dict[str, int] | None = None,
        findings: Mapping[str, Corruption] | None = None,
        num_predicted: int = 0,
    ) -> Mapping[int, EngineCoreOutputs]:
        """As the engine's core sends them, by client: one token for each request whose prompt is done, and
        one portion of rows for each of `senders`; vLLM's count of logits that are not numbers, and what our
        runner found corrupt. Predicted codes equal their token."""
        request_ids = list(output.num_scheduled_tokens)
        sampled, rows = [], []
        slot, portion = attached_step(output).slot, 0
        for request_id in request_ids:
            known = self.scheduler.requests.get(request_id)
            is_prefill = known is not None and known.num_computed_tokens < known.num_tokens
            sampled.append([] if is_prefill else [token])
            message = None
            if num_predicted and not is_prefill:
                message = torch.full((1, num_predicted), token, dtype=torch.int16)
            if request_id in senders:
                assert slot is not None
                block = SharedBlock(slot.slot, slot.generation, portion)
                message = torch.frombuffer(bytearray(encode(rows_payload(block, 0, 1))), dtype=torch.uint8)
                portion += 1
            rows.append(message)
        if slot is not None:
            assert self._output_queue is not None
            self._output_queue.publish(slot.slot, slot.generation, portion)
        result = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
            pooler_output=rows if senders or num_predicted else None,
            num_nans_in_logits=num_nans,
        )
        if findings is not None:
            attach_findings(result, findings)
        return self.scheduler.update_from_output(output, result)

    def step(self) -> dict[str, int]:
        """Schedule and answer; how many tokens of each request were computed."""
        output = self.schedule()
        self.answer(output)
        return dict(output.num_scheduled_tokens)


def rows(queue: SlabQueue, first: int, count: int, num_released: int | None = None) -> RowsFeed:
    """As the thinker's worker and the orchestrator make it."""
    taken = queue.take()
    assert taken is not None
    queue.publish(*taken, 1)
    return RowsFeed(rows_payload(SharedBlock(*taken, 0), first, count), num_released=num_released)


def consume(worker: Worker, queue: SlabQueue) -> None:
    """What the talker's worker does with the feeds of the last step."""
    for _, message in worker.steps[-1].feeds:
        if message.payload is not None:
            assert isinstance(message.payload.block, SharedBlock)
            queue.finish(message.payload.block, 0)
