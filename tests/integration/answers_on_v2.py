"""Answers cases on vLLM's V2 model runner, on a CPU, and prints as JSON what came out. Used by
test_v2_runner.

The arguments are a family of `FAMILIES`, a checkpoint folder, and names of the family's cases.

Needs tests/integration/v2_on_cpu on PYTHONPATH. As on a GPU, the autoregressive engines schedule
asynchronously, which vLLM switches off on CPUs; both that and the choice of our scheduler are changed in this
process, which builds the engines' configs.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms.cpu import CpuPlatform

from omni_server.engine import launcher
from omni_server.engine.engine_args import ASYNC_SCHEDULER, ar_engine_args
from tests.integration.live import LiveOmni, demo_config
from tests.integration.parity import qwen3_config, request_for
from tests.reference.cases import CASES
from tests.reference.qwen3_cases import QWEN3_CASES

BLOCK_SIZE = 32
COMPARING_WORKER = "tests.integration.worker_that_compares.ComparingWorker"
"""Each step that one kernel prepares is prepared by vLLM, too; the engine ends with the first difference."""

FAMILIES = {"qwen2_5_omni": (demo_config, CASES, 8), "qwen3_omni": (qwen3_config, QWEN3_CASES, 7)}
"""Demo config, cases, and KV blocks: too few for all requests at once, so some are preempted."""


def schedule_asynchronously(patch: pytest.MonkeyPatch) -> None:
    check_and_update_config = CpuPlatform.check_and_update_config

    def asynchronous(vllm_config: Any) -> None:
        is_ar = vllm_config.scheduler_config.scheduler_cls == ASYNC_SCHEDULER
        check_and_update_config(vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_ar

    def engine_args(*args: Any, **kwargs: Any) -> AsyncEngineArgs:
        arguments = ar_engine_args(*args, **kwargs)
        arguments.scheduler_cls = ASYNC_SCHEDULER
        arguments.worker_cls = COMPARING_WORKER
        return arguments

    patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(asynchronous))
    patch.setattr(launcher, "ar_engine_args", engine_args)


def answers(family: str, model_dir: Path, names: list[str]) -> dict[str, Any]:
    config, cases, num_blocks = FAMILIES[family]
    cramped = {
        "max_model_len": BLOCK_SIZE * (num_blocks - 1),  # vLLM uses none of the first block
        "max_num_batched_tokens": 64,  # too few for all prompts, or for one with media
    }
    few_blocks = {"num_gpu_blocks_override": num_blocks, "mm_processor_cache_gb": 0}
    stages = {name: cramped | {"engine_args": dict(few_blocks)} for name in ("thinker", "talker")}
    live = LiveOmni(model_dir, config(chunks={"mode": "whole"}, stages=stages))
    try:
        together = live.answers([request_for(cases[name]) for name in names])
        return {
            "generations": live.runner_generations(),
            "text_ids": [answer.token_ids for answer in together],
            "codes": [answer.codes for answer in together],
            "resumed": live.num_resumed(),
            "steady_steps": live.num_steady_steps(),
            "held_rows": live.held_rows(),
            "slots_in_use": live.row_slots().in_use,
        }
    finally:
        live.close()


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        schedule_asynchronously(patch)
        sys.stdout.write(json.dumps(answers(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])) + "\n")
