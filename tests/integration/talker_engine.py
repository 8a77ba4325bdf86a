"""Speaks utterances on a single talker engine in this process, without a server. Used by test_frames.

The arguments are a checkpoint folder, and files for `torch.load` and `torch.save`: the utterances by name,
the runs `(Engine, Speaking)`, and the results. vLLM's V2 model runner needs tests/integration/v2_on_cpu on
PYTHONPATH."""

import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import ModelRegistry, SamplingParams
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from omni_server.config.stages import ArStage
from omni_server.engine.engine_args import ASYNC_SCHEDULER, ar_engine_args
from omni_server.protocol.rows import (
    FEEDS_KEY,
    FEEDS_REQUEST_ID,
    REQUEST_KEY,
    InlineBlock,
    RowsFeed,
    RowsInput,
    RowsPayload,
    Segment,
    encode,
    encode_feeds,
)
from omni_server.protocol.runtime_config import QueueSpec, StageRuntimeConfig
from omni_server.protocol.vllm_fields import TOKENS_PER_OUTPUT_KEY
from stages.qwen3_omni.hf_overrides import talker_config
from stages.qwen3_omni.talker import Qwen3OmniTalker
from tests.integration.utterances import Engine, Run, Speaking, Spoken, Utterance

MAX_NUM_SEQS = 4
CRAMPED_TOKENS, ROOMY_TOKENS = 32, 512
"""Tokens of a step; fewer than those of a prompt or of what a preempted request computes again."""
CRAMPED_BLOCKS = 5
"""Too few for all requests at once: some are preempted."""
MAX_STEPS = 5000


class Talker:
    """An engine core, driven step by step."""

    def __init__(self, model_dir: Path, engine: Engine) -> None:
        stage = ArStage(
            engine="ar",
            model_stage="talker",
            max_model_len=128,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=CRAMPED_TOKENS if engine.is_cramped else ROOMY_TOKENS,
            dtype="float32",
        )
        queue = QueueSpec(capacity=1, path=None, slot_bytes=0, max_portions=8, num_consumers=1)
        runtime = StageRuntimeConfig(str(model_dir), input_queues=(queue,), num_predicted=15)
        arguments = ar_engine_args(
            model_dir, stage, runtime, platform="cpu", load_format="auto", hf_overrides=talker_config
        )
        arguments.enforce_eager = True
        arguments.block_size = 32
        arguments.kv_cache_memory_bytes = 16 << 20
        if engine.is_cramped:
            arguments.num_gpu_blocks_override = CRAMPED_BLOCKS
        if engine.is_async:
            arguments.scheduler_cls = ASYNC_SCHEDULER
        with pytest.MonkeyPatch.context() as patch:
            if engine.is_async:
                _schedule_asynchronously(patch)
            config = arguments.create_engine_config()
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)

    def speak(self, utterances: dict[str, Utterance], speaking: Speaking) -> Run:
        resumed = self._count("num_resumed")
        spoken: dict[str, Spoken] = {name: Spoken() for name in speaking.names}
        groups = [speaking.names] if speaking.is_together else [(name,) for name in speaking.names]
        for group in groups:
            self._speak({name: utterances[name] for name in group}, speaking, spoken)
        return Run(
            speaking,
            spoken,
            self._count("num_resumed") - resumed,
            self._count("num_row_requests"),
            self._count("runner_generation"),
            self._core.batch_queue is not None,
        )

    def _speak(self, utterances: dict[str, Utterance], speaking: Speaking, spoken: dict[str, Spoken]) -> None:
        feeders = {name: _Feeder(utterance) for name, utterance in utterances.items()}
        for name, utterance in utterances.items():
            self._add(name, utterance.prompt_ids, _params(utterance, speaking))
        pace = random.Random(0)
        running = set(utterances)
        for _ in range(MAX_STEPS):
            if not running:
                break
            feeds = []
            for name in sorted(running):
                is_slow = speaking.is_together and pace.random() < 0.4
                if not is_slow and (
                    feed := feeders[name].next(pace.randint(1, 3) if speaking.is_together else None)
                ):
                    feeds.append((name, feed))
            if feeds:
                params = SamplingParams(max_tokens=1, extra_args={FEEDS_KEY: encode_feeds(feeds)})
                self._add(FEEDS_REQUEST_ID, (0,), params)
            running -= self._step(spoken)
        assert not running, running
        for _ in range(2):  # ends what has finished in the worker, too
            self._step(spoken)

    def _step(self, spoken: dict[str, Spoken]) -> set[str]:
        """Returns the requests that have finished."""
        step = self._core.step_with_batch_queue if self._core.batch_queue is not None else self._core.step
        outputs, _ = step()
        finished = set()
        for group in (outputs or {}).values():
            for output in group.outputs:
                made = spoken[output.request_id]
                made.num_outputs += 1
                assert output.pooling_output is not None
                assert output.pooling_output.dtype == torch.int16
                rows = output.pooling_output.tolist()
                made.frames += [
                    [token, *codes] for token, codes in zip(output.new_token_ids, rows, strict=True)
                ]
                if output.new_logprobs is not None:
                    made.logprobs += [float(of_token[0]) for of_token in output.new_logprobs.logprobs]
                if output.finish_reason is not None:
                    made.finish_reason = str(output.finish_reason)
                    finished.add(output.request_id)
        return finished

    def _add(self, request_id: str, token_ids: tuple[int, ...], params: SamplingParams) -> None:
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))

    def _count(self, name: str) -> int:
        (count,) = self._core.collective_rpc(name)
        return int(count)

    def close(self) -> None:
        self._core.shutdown()


class _Feeder:
    """Sends the rows of one utterance, the whole prompt first."""

    def __init__(self, utterance: Utterance) -> None:
        self._utterance = utterance
        self._num_sent = 0

    def next(self, count: int | None) -> RowsFeed | None:
        """At most `count` further rows; None: all."""
        utterance, first = self._utterance, self._num_sent
        if first == len(utterance.rows):
            return None
        length = len(utterance.prompt_ids)
        self._num_sent = end = min(
            len(utterance.rows), max(length, first + (len(utterance.rows) if count is None else count))
        )
        data = bytearray(utterance.rows[first:end].numpy().tobytes())
        extra: dict[str, Any] = {}
        if first == 0:
            extra["tail"] = Segment(0, 2, len(data))
            data += utterance.tail.numpy().tobytes()
            extra |= {"positions_offset": len(data), "num_positions": length + 1}
            positions = torch.cat((utterance.positions, utterance.positions[:, -1:] + 1), 1)
            data += positions.numpy().tobytes()
        payload = RowsPayload(
            prompt_length=length,
            num_generated_rows=end - length,
            width=utterance.rows.shape[1],
            dtype="float32",
            block=InlineBlock(bytes(data)),
            segments=(Segment(first, end - first, 0),),
            **extra,
        )
        return RowsFeed(payload, final_length=end if end == len(utterance.rows) else None)


def _params(utterance: Utterance, speaking: Speaking) -> SamplingParams:
    replaced = encode(RowsInput(num_replaced=utterance.num_replaced))
    extra: dict[str, bytes | tuple[int, ...]] = {REQUEST_KEY: replaced}
    if speaking.tokens_per_output != (1,):
        extra[TOKENS_PER_OUTPUT_KEY] = speaking.tokens_per_output
    return SamplingParams(
        temperature=speaking.temperature,
        top_k=50 if speaking.temperature else 0,
        repetition_penalty=1.05,
        seed=speaking.seed,
        max_tokens=speaking.num_codes,
        ignore_eos=True,
        detokenize=False,
        logprobs=0 if speaking.has_logprobs else None,
        extra_args=extra,
    )


def _schedule_asynchronously(patch: pytest.MonkeyPatch) -> None:
    """vLLM switches asynchronous scheduling off on CPUs."""
    check_and_update_config = CpuPlatform.check_and_update_config

    def asynchronous(vllm_config: Any) -> None:
        check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(asynchronous))


def main(model_dir: Path, utterances: Path, runs: Path, results: Path) -> None:
    torch.set_num_threads(1)
    ModelRegistry.register_model(Qwen3OmniTalker.__name__, Qwen3OmniTalker)
    wanted: list[tuple[Engine, Speaking]] = torch.load(runs, weights_only=False)
    spoken: dict[int, Run] = {}
    for engine in dict.fromkeys(engine for engine, _ in wanted):
        talker = Talker(model_dir, engine)
        try:
            for number, (wanted_engine, speaking) in enumerate(wanted):
                if wanted_engine == engine:
                    rows = torch.load(utterances, weights_only=False)
                    spoken[number] = talker.speak(rows, speaking)
        finally:
            talker.close()
    torch.save([spoken[number] for number in range(len(wanted))], results)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))
