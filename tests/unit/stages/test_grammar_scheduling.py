"""Requests whose grammar fails them, in vLLM's own scheduler."""

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
from stages.runtime.grammar_limits import GrammarCompilers, GrammarRefusedError
from stages.runtime.stage_scheduler import AsyncStageScheduler, StageScheduler
from tests.unit.stages.grammars import ScriptedGrammar
from tests.unit.stages.scheduling import (
    AnyScheduler,
    Worker,
    make_scheduler,
    request,
)

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


@pytest.mark.parametrize("scheduler_class", [StageScheduler, AsyncStageScheduler])
def test_a_grammar_that_is_not_compiled_in_time_ends_its_request_with_the_reason(
    tmp_path: Path, scheduler_class: type[StageScheduler] | type[AsyncStageScheduler]
) -> None:
    scheduler = make_scheduler(tmp_path, scheduler_class=scheduler_class)
    release = threading.Event()
    compilers = GrammarCompilers(num_threads=1, limit_s=0.01)
    compiled = compilers.submit(release.wait, 30)
    waiting = Request(
        "slow",
        list(range(PROMPT)),
        SamplingParams(max_tokens=50, structured_outputs=StructuredOutputsParams(regex="a*")),
        None,
    )
    assert waiting.structured_output_request is not None
    waiting.structured_output_request.grammar = compiled
    scheduler.structured_output_manager.backend = MaskMaker()
    scheduler.add_request(waiting)
    scheduler.add_request(request("free", PROMPT, None))
    try:
        assert isinstance(compiled.exception(30), GrammarRefusedError)
        outputs = structured_step(Worker(scheduler))
    finally:
        release.set()
    assert outputs["slow"].finish_reason == FinishReason.ERROR
    assert outputs["slow"].stop_reason == GRAMMAR_TOO_SLOW
    assert outputs["free"].finish_reason is None
    assert outputs["free"].stop_reason is None


def test_a_stage_compiles_grammars_within_limits_and_does_not_wait_for_them_at_its_end(
    tmp_path: Path,
) -> None:
    manager = make_scheduler(tmp_path).structured_output_manager
    assert isinstance(manager.executor, GrammarCompilers)
    release = threading.Event()
    compiling = manager.executor.submit(release.wait, 30)
    try:
        manager.vllm_config.model_config.skip_tokenizer_init = False  # or vLLM would expect no executor
        manager.clear_backend()
        assert not compiling.done()
    finally:
        release.set()
