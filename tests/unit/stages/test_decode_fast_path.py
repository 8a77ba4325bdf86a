"""Which steps are prepared by one kernel. That it is used, and what it computes, is compared with vLLM in
tests/integration/test_v2_runner.py; here it does nothing."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from stages.runtime import decode_fast_path
from stages.runtime.decode_fast_path import DecodeFastPath

SIZE = 4
CAPTURED = BatchExecutionDescriptor(
    cg_mode=CUDAGraphMode.FULL, num_tokens=SIZE, num_reqs=SIZE, uniform_token_count=1
)
BLOCKS_AND_SLOTS = ((torch.zeros(SIZE, 1),), torch.zeros(1, SIZE))


class Model:
    def __init__(self, quant_method: object | None = None) -> None:
        unquantized = object.__new__(UnquantizedEmbeddingMethod)
        self.token_embedding = SimpleNamespace(
            quant_method=quant_method or unquantized, weight=torch.zeros(9, 2)
        )
        self.is_kernel = True

    def attends_by_kernel(self, metadata: dict[str, Any]) -> bool:
        return self.is_kernel


class Overlay:
    """Rows of every request but those that are named."""

    def __init__(self) -> None:
        self.not_fed: set[str] = set()

    def added_rows(self, request_ids: list[str], positions: Any, embeds: torch.Tensor) -> torch.Tensor | None:
        return None if self.not_fed & set(request_ids) else torch.zeros(len(request_ids), 2)


def runner(model: Any = None, mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, **changes: Any) -> Any:
    """What `DecodeFastPath` looks at in vLLM's runner; `changes` by the names of attributes, two underscores
    for a dot."""
    model = Model() if model is None else model
    on_device = SimpleNamespace(gpu=torch.zeros(SIZE, 1))
    made = SimpleNamespace(
        get_model=lambda: model,
        model_state=SimpleNamespace(
            supports_mm_inputs=False,
            rope_state=SimpleNamespace(num_dims=3, positions=torch.zeros(3, 9), prefill_delta=on_device),
            inputs_embeds=torch.zeros(8, 2),
        ),
        block_tables=SimpleNamespace(
            num_kv_cache_groups=1,
            block_tables=[on_device],
            block_sizes=[16],
            slot_mappings=torch.zeros(1, 8),
            input_block_tables=[torch.zeros(SIZE, 1)],
        ),
        parallel_config=SimpleNamespace(
            world_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_size=1,
        ),
        lora_config=None,
        speculative_config=None,
        fast_prefill=None,
        model_config=SimpleNamespace(rswa_window=None),
        req_states=SimpleNamespace(
            num_computed_tokens=on_device,
            num_computed_tokens_np=np.array([10, 20, 30, 40], np.int32),
            last_sampled_tokens=torch.zeros(SIZE, 1),
        ),
        input_buffers=InputBuffers(SIZE, 8, torch.device("cpu")),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
    )
    for name, value in changes.items():
        *owners, attribute = name.split("__")
        owner = made
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, attribute, value)
    return made


class Steps:
    """Steps of requests "a", "b" and "c" in the places 2, 0 and 1, in a graph of four."""

    def __init__(self, **kwargs: Any) -> None:
        self.runner = runner(**kwargs)
        self.overlay = Overlay()
        made = DecodeFastPath.of(self.runner, self.overlay)  # type: ignore[arg-type]
        assert made is not None
        self.fast_path = made

    def state(self, names: str = "abc", places: tuple[int, ...] = (2, 0, 1), **changes: Any) -> Any:
        num = len(names)
        values = {
            "has_prefill": False,
            "num_tokens": num,
            "num_computed_prefill_tokens_np": np.full(num, 5, np.int32),
        }
        return SimpleNamespace(
            req_ids=list(names), idx_mapping_np=np.array(places, np.intp), **values | changes
        )

    def prepare(self, descriptor: BatchExecutionDescriptor | None = None, **changes: Any) -> None:
        """A step that is prepared by the runner."""
        batch = InputBatch.make_dummy(3, 3, self.runner.input_buffers)
        batch.req_ids, batch.idx_mapping_np, batch.num_reqs_after_padding = (
            list("abc"),
            np.array([2, 0, 1]),
            SIZE,
        )
        for name, value in changes.items():
            setattr(batch, name, value)
        self.fast_path.prepared(batch, CAPTURED if descriptor is None else descriptor)
        self.fast_path.keep_blocks_and_slots(BLOCKS_AND_SLOTS)
        self.fast_path.keep_metadata({"layer": 1})

    def next(
        self, state: Any = None, descriptor: BatchExecutionDescriptor = CAPTURED, has_grammars: bool = False
    ) -> InputBatch | None:
        return self.fast_path.next_batch(self.state() if state is None else state, descriptor, has_grammars)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(decode_fast_path, "advance", lambda *args: made.append(args))
    return made


@pytest.mark.parametrize(
    "change",
    [
        {"model": SimpleNamespace()},
        {"model": Model(quant_method=object())},
        {"parallel_config__world_size": 2},
        {"parallel_config__decode_context_parallel_size": 2},
        {"parallel_config__prefill_context_parallel_size": 2},
        {"parallel_config__data_parallel_size": 2},
        {"lora_config": object()},
        {"speculative_config": object()},
        {"fast_prefill": object()},
        {"model_config__rswa_window": 5},
        {"model_state__supports_mm_inputs": True},
        {"model_state__rope_state": None},
        {"model_state__rope_state__num_dims": 1},
        {"block_tables__num_kv_cache_groups": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_where_a_step_has_to_do_with_more_vllm_prepares_them_all(change: dict[str, Any]) -> None:
    assert DecodeFastPath.of(runner(**change), Overlay()) is None  # type: ignore[arg-type]
    assert DecodeFastPath.of(runner(), Overlay()) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"names": "acb"},
        {"names": "abd"},
        {"names": "ab", "places": (2, 0)},
        {"places": (2, 0, 3)},  # resumed elsewhere
        {"has_prefill": True},
        {"num_tokens": 4},
    ],
    ids=str,
)
def test_any_other_step_is_the_runners(change: dict[str, Any], calls: list[Any]) -> None:
    steps = Steps()
    steps.prepare()
    assert steps.next() is not None
    assert steps.next(steps.state(**change)) is None
    assert steps.fast_path.blocks_and_slots() is None
    assert steps.fast_path.metadata() is None
    assert not steps.fast_path.is_fast
    assert len(calls) == 1


def test_another_graph_or_a_grammar_makes_it_the_runners() -> None:
    steps = Steps()
    steps.prepare()
    assert steps.next(descriptor=BatchExecutionDescriptor(CUDAGraphMode.NONE, 3, 3)) is None
    assert steps.next(has_grammars=True) is None
    assert steps.next() is not None


def test_requests_that_are_not_fed_make_it_the_runners(calls: list[Any]) -> None:
    steps = Steps()
    steps.prepare()
    steps.overlay.not_fed = {"b"}
    assert steps.next() is None
    assert calls == []


def test_behind_a_dummy_run_the_next_is_the_runners() -> None:
    steps = Steps()
    steps.prepare()
    assert steps.next() is not None
    steps.fast_path.forget()
    assert steps.fast_path.blocks_and_slots() is None
    assert steps.next() is None


def test_metadata_are_kept_where_a_graph_of_decoding_steps_reads_none_of_them() -> None:
    steps = Steps()
    steps.prepare()
    assert steps.fast_path.metadata() is None  # the runner's own step
    assert steps.next() is not None
    assert steps.fast_path.metadata() == {"layer": 1}


@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY]
)
@pytest.mark.parametrize("is_kernel", [True, False])
def test_else_they_are_made_in_each_step(mode: CUDAGraphMode, is_kernel: bool) -> None:
    model = Model()
    model.is_kernel = is_kernel
    steps = Steps(model=model, mode=mode)
    steps.prepare()
    assert steps.next() is not None
    has_own_graphs = mode == CUDAGraphMode.FULL_DECODE_ONLY
    assert (steps.fast_path.metadata() is not None) == (is_kernel and has_own_graphs)


def test_they_are_made_in_each_step_whose_graph_was_captured_for_prompts_too() -> None:
    """Attention in it is vLLM's, whichever kernel could have computed the step."""
    whole = replace(CAPTURED, uniform_token_count=None)
    steps = Steps()
    steps.prepare(whole)
    assert steps.next(descriptor=whole) is not None
    assert steps.fast_path.metadata() is None
