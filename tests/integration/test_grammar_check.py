"""Grammars are checked in processes with limits, which leave nothing behind."""

import asyncio
import json
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from vllm.config import ModelConfig, VllmConfig
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from omni_server.engine import fork_server, grammar_check
from omni_server.engine.grammar_check import GrammarCheck
from omni_server.errors import InvalidRequestError, OverloadedError
from stages.qwen2_5_omni import FAMILY
from tests.integration.server_process import wait_until
from tests.unit.stages.scheduling import TEXT_MODEL

NUM_TOKENS = 151_936
"""As many as Qwen's models have: the time of a compilation grows with them."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ORDINARY = StructuredOutputsParams(json='{"type": "object", "properties": {"a": {"enum": ["b", "c"]}}}')
NOT_COMPILED = StructuredOutputsParams(json=json.dumps({"type": "string", "pattern": "(a|b){0,2000}"}))
"""xgrammar 0.2.8 fails a check of its own."""
SLOW_TO_FOLLOW = StructuredOutputsParams(regex="(([a-z]{1,5}){1,50}){1,50}")
"""Compiled in milliseconds, but a mask takes a quarter of a minute."""


def long_enum(seed: int) -> StructuredOutputsParams:
    value = "".join(random.Random(seed).choices(LETTERS + " ", k=240_000))
    return StructuredOutputsParams(json=json.dumps({"enum": [value]}))


def many_alternatives() -> StructuredOutputsParams:
    return StructuredOutputsParams(regex="|".join(f"{number}x" for number in range(100_000)))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """Of a model with words of random letters."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TEXT_MODEL | {"vocab_size": NUM_TOKENS}))
    draw = random.Random(1)
    words = dict.fromkeys(["<end>", *pre_tokenizers.ByteLevel.alphabet()])
    while len(words) < NUM_TOKENS:
        words[draw.choice(["", "Ġ"]) + "".join(draw.choices(LETTERS, k=draw.randint(2, 9)))] = None
    tokenizer = Tokenizer(BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    model = ModelConfig(model=str(folder), dtype="float32", max_model_len=512)
    return VllmConfig(
        model_config=model,
        structured_outputs_config=StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True),
    )


@pytest.fixture(scope="module")
def grammars(config: VllmConfig) -> Iterator[GrammarCheck]:
    fork_server.start(FAMILY)
    check = GrammarCheck(lambda: config)
    yield check
    check.end()


def checking() -> list[int]:
    """The processes that check a grammar: all but the one that waits for the next."""
    children: list[str] = []
    for program in multiprocessing.active_children():  # none before the first check
        children += Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
    return [int(child) for child in children][:-1]


async def wait_for_checks(number: int) -> None:
    await asyncio.to_thread(wait_until, lambda: len(checking()) == number, 60)


async def test_a_grammar_comes_back_as_the_engine_expects_it(grammars: GrammarCheck) -> None:
    schema = await grammars.check(ORDINARY)
    assert (schema.json, schema._backend) == (ORDINARY.json, "xgrammar")
    choice = await grammars.check(StructuredOutputsParams(choice=["a", "b"]))
    assert (choice.choice, choice.grammar) == (None, 'root ::= "a" | "b"')


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (StructuredOutputsParams(regex="(["), "Unclosed"),
        (StructuredOutputsParams(regex="a\0"), "NUL"),
        (StructuredOutputsParams(regex="a\ud800"), "surrogates"),
        (StructuredOutputsParams(json='{"type": "foo"}'), '"foo"'),
        (StructuredOutputsParams(json=100 * '{"not": ' + "{}" + 100 * "}"), "nest"),
    ],
)
async def test_what_vllm_refuses_is_refused_with_the_cause(
    grammars: GrammarCheck, wanted: StructuredOutputsParams, why: str
) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        await grammars.check(wanted)
    assert why in f"{caught.value} {caught.value.__cause__}"


async def test_a_grammar_that_the_compiler_fails_on_is_refused(grammars: GrammarCheck) -> None:
    with pytest.raises(VLLMValidationError, match="cannot be compiled"):
        await grammars.check(NOT_COMPILED)


@pytest.mark.parametrize("wanted", [long_enum(1), SLOW_TO_FOLLOW], ids=["compile", "mask"])
async def test_a_grammar_that_takes_too_long_is_refused_and_its_process_gone(
    grammars: GrammarCheck, monkeypatch: pytest.MonkeyPatch, wanted: StructuredOutputsParams
) -> None:
    monkeypatch.setattr(grammar_check, "CPU_LIMIT_S", 1)
    with pytest.raises(InvalidRequestError, match="too much time") as caught:
        await grammars.check(wanted)
    assert caught.value.code == "unsupported_value"
    assert checking() == []


async def test_an_innocent_schema_does_not_wait_for_two_that_take_long(
    grammars: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "CPU_LIMIT_S", 600)
    long = [asyncio.create_task(grammars.check(long_enum(seed))) for seed in (2, 3)]
    await wait_for_checks(2)
    assert await grammars.check(StructuredOutputsParams(json='{"enum": ["innocent"]}'))
    assert not any(task.done() for task in long)
    for task in long:
        task.cancel()
    await asyncio.wait(long)
    await wait_for_checks(0)


async def test_a_grammar_that_takes_too_much_memory_is_refused(
    grammars: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_MEMORY_BYTES", 50 << 20)
    with pytest.raises(InvalidRequestError, match="too much memory"):
        await grammars.check(many_alternatives())
    monkeypatch.undo()
    assert await grammars.check(StructuredOutputsParams(json='{"enum": ["small"]}'))


async def test_who_waits_too_long_for_a_place_is_told_that_the_server_is_busy(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "NUM_PLACES", 1)
    monkeypatch.setattr(grammar_check, "QUEUE_TIMEOUT_S", 0.01)
    starts = threading.Event()

    def config_at_a_start() -> VllmConfig:
        starts.set()
        return config

    check = GrammarCheck(config_at_a_start)
    first = asyncio.create_task(check.check(long_enum(1)))
    await asyncio.to_thread(starts.wait)  # from now on, the end waits for the program's start
    with pytest.raises(OverloadedError):
        await check.check(ORDINARY)
    first.cancel()
    await asyncio.wait([first])
    check.end()


async def test_who_leaves_while_a_grammar_is_checked_leaves_no_process_and_no_busy_thread(
    grammars: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "CPU_LIMIT_S", 600)
    monkeypatch.setattr(grammar_check, "TIMEOUT_S", 600.0)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    left = [asyncio.create_task(grammars.check(long_enum(1))) for _ in range(4)]
    await wait_for_checks(4)
    await asyncio.to_thread(bool)
    for task in left:
        task.cancel()
    await asyncio.wait(left)
    assert await grammars.check(StructuredOutputsParams(json='{"enum": ["next"]}'))
    await wait_for_checks(0)


async def test_a_grammar_that_was_checked_is_not_checked_again(grammars: GrammarCheck) -> None:
    first = await grammars.check(ORDINARY)
    (program,) = multiprocessing.active_children()
    assert program.pid is not None
    os.kill(program.pid, signal.SIGSTOP)
    try:
        again = await asyncio.wait_for(grammars.check(ORDINARY), 10)
    finally:
        os.kill(program.pid, signal.SIGCONT)
    assert again == first
    assert again is not first


def test_its_end_leaves_no_process(grammars: GrammarCheck) -> None:
    grammars.end()
    assert multiprocessing.active_children() == []
