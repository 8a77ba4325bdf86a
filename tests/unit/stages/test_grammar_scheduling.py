"""Requests whose grammar fails them, in vLLM's own scheduler."""

import os
import threading
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)

from omni_server.protocol.vllm_fields import GRAMMAR_TOO_SLOW
from stages.runtime.stage_scheduler import COMPILE_NICENESS, AsyncStageScheduler, StageScheduler
from tests.unit.stages.grammars import ScriptedGrammar
from tests.unit.stages.scheduling import AnyScheduler, Worker, make_scheduler, request

PROMPT = 6


class MaskMaker(StructuredOutputBackend):
    """As much of a backend as the scheduler needs once grammars are there."""

    def __init__(self) -> None:
        """Without a tokenizer."""

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> StructuredOutputGrammar:
        raise AssertionError("the grammars are there already")

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.zeros((max_num_seqs, 4), dtype=torch.int32)

    def destroy(self) -> None:
        """Nothing to free."""


def structured(scheduler: AnyScheduler, request_id: str, grammar: StructuredOutputGrammar) -> Request:
    params = SamplingParams(
        max_tokens=50, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="a*")
    )
    made = Request(request_id, list(range(PROMPT)), params, None)
    assert made.structured_output_request is not None
    made.structured_output_request.grammar = grammar
    scheduler.structured_output_manager.backend = MaskMaker()
    scheduler.add_request(made)
    return made


def structured_step(worker: Worker) -> dict[str, EngineCoreOutput]:
    output = worker.schedule()
    worker.scheduler.get_grammar_bitmask(output)
    return worker.answer(output)


@pytest.mark.parametrize("scheduler_class", [StageScheduler, AsyncStageScheduler])
def test_a_grammar_that_takes_too_long_ends_its_request_and_no_other(
    tmp_path: Path, scheduler_class: type[StageScheduler] | type[AsyncStageScheduler]
) -> None:
    scheduler = make_scheduler(tmp_path, scheduler_class=scheduler_class)
    worker, slow, quick = Worker(scheduler), ScriptedGrammar(), ScriptedGrammar()
    structured(scheduler, "slow", slow)
    structured(scheduler, "quick", quick)
    scheduler.add_request(request("free", PROMPT, None))
    assert {name: one.finish_reason for name, one in structured_step(worker).items()} == {
        "slow": None,
        "quick": None,
        "free": None,
    }
    slow.spin_s = 1000.0
    ended = structured_step(worker)["slow"]
    assert ended.finish_reason == FinishReason.ERROR
    assert ended.stop_reason == GRAMMAR_TOO_SLOW
    slow.is_released.set()
    assert structured_step(worker).keys() == {"quick", "free"}
    assert quick.accepted == [7, 7, 7]


def test_a_grammar_that_refuses_a_token_is_not_called_slow(tmp_path: Path) -> None:
    class Refusing(ScriptedGrammar):
        def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
            return False

    scheduler = make_scheduler(tmp_path)
    structured(scheduler, "a", Refusing())
    ended = structured_step(Worker(scheduler))["a"]
    assert ended.finish_reason == FinishReason.ERROR
    assert ended.stop_reason is None


def test_threads_that_compile_have_a_low_priority(tmp_path: Path) -> None:
    def priorities() -> list[int]:
        found = [os.getpriority(os.PRIO_PROCESS, threading.get_native_id())]
        inner = threading.Thread(
            target=lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        )
        inner.start()
        inner.join()
        return found

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with make_scheduler(tmp_path).structured_output_manager.executor as executor:
        assert executor.submit(priorities).result(30) == [min(before + COMPILE_NICENESS, 19)] * 2
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
