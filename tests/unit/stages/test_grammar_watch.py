"""Grammars that take too long are given up, the others do not notice that they are watched."""

import threading
from collections.abc import Iterator

import pytest
import torch
import xgrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from omni_server.protocol.vllm_fields import GRAMMAR_ALLOWS_NOTHING, GRAMMAR_TOO_SLOW, GRAMMARS_BUSY
from stages.runtime.grammar_watch import GrammarWatch
from tests.unit.stages.grammars import ScriptedGrammar

FOR_EVER_S = 1000.0


@pytest.fixture
def slow() -> Iterator[ScriptedGrammar]:
    grammar = ScriptedGrammar(spin_s=FOR_EVER_S)
    yield grammar
    grammar.is_released.set()


def masks() -> torch.Tensor:
    return torch.full((3, 2), 5, dtype=torch.int32)


def test_a_quick_grammar_is_followed() -> None:
    grammar = ScriptedGrammar()
    watched = GrammarWatch().watched(grammar, "a")
    bitmask = masks()
    watched.fill_bitmask(bitmask, 1)
    assert bitmask.tolist() == [[5, 5], [8, 0], [5, 5]]
    assert watched.accept_tokens("a", [3, 4])
    assert watched.validate_tokens([6, 7]) == [6]
    watched.rollback(1)
    assert grammar.accepted == [3]
    assert not watched.is_terminated()
    assert watched.accept_tokens("a", [2])
    assert watched.is_terminated()
    watched.reset()
    assert grammar.accepted == []
    assert watched.refusal is None


def test_a_token_that_takes_too_long_is_not_waited_for(slow: ScriptedGrammar) -> None:
    watched = GrammarWatch(call_limit_s=0.01).watched(slow, "a")
    assert not watched.accept_tokens("a", [3])
    assert watched.refusal == GRAMMAR_TOO_SLOW
    assert not watched.is_terminated()
    assert not watched.accept_tokens("a", [3])
    assert watched.validate_tokens([3]) == []


def test_a_mask_that_comes_too_late_goes_nowhere(slow: ScriptedGrammar) -> None:
    watched = GrammarWatch(call_limit_s=0.01).watched(slow, "a")
    bitmask = masks()
    watched.fill_bitmask(bitmask, 1)
    assert bitmask.tolist() == [[5, 5], [-1, -1], [5, 5]]
    slow.is_released.set()
    for thread in threading.enumerate():
        if thread.ident in slow.threads:
            thread.join()
    assert bitmask.tolist() == [[5, 5], [-1, -1], [5, 5]]
    assert not watched.accept_tokens("a", [3])


def test_many_calls_that_are_each_just_quick_enough_are_too_much_together() -> None:
    grammar = ScriptedGrammar(spin_s=0.1)
    watched = GrammarWatch(call_limit_s=FOR_EVER_S).watched(grammar, "a")
    num_accepted = 0
    while watched.accept_tokens("a", [3]):
        num_accepted += 1
        assert num_accepted < 20
    assert watched.refusal == GRAMMAR_TOO_SLOW


def test_others_are_followed_while_a_call_that_was_given_up_runs(slow: ScriptedGrammar) -> None:
    watch = GrammarWatch(call_limit_s=0.01)
    watch.watched(slow, "a").accept_tokens("a", [3])
    assert watch.watched(ScriptedGrammar(), "b").accept_tokens("b", [3])


def test_new_grammars_are_refused_while_too_many_that_were_given_up_run(slow: ScriptedGrammar) -> None:
    watch = GrammarWatch(call_limit_s=0.01, max_left_behind=1)
    watch.watched(slow, "a").accept_tokens("a", [3])
    refused = watch.watched(ScriptedGrammar(), "b")
    assert refused.refusal == GRAMMARS_BUSY
    assert not refused.accept_tokens("b", [3])
    slow.is_released.set()
    for thread in threading.enumerate():
        if thread.ident in slow.threads:
            thread.join()
    assert watch.watched(ScriptedGrammar(), "c").accept_tokens("c", [3])


def test_an_error_inside_a_grammar_is_raised_where_it_was_called() -> None:
    grammar = ScriptedGrammar()
    grammar.error = RuntimeError("no such token")
    watched = GrammarWatch().watched(grammar, "a")
    with pytest.raises(RuntimeError, match="no such token"):
        watched.accept_tokens("a", [3])


def test_a_real_grammar_that_is_read_in_too_many_ways_is_given_up() -> None:
    vocabulary = [bytes([i]) for i in range(256)] + [b"abcdefgh", b"</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[257])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    context = compiler.compile_regex("(([a-z]{1,50}){1,500}){1,500}")
    matcher = xgrammar.GrammarMatcher(context)
    watched = GrammarWatch().watched(XgrammarGrammar(matcher=matcher, vocab_size=258, ctx=context), "a")
    num_accepted = 0
    while watched.accept_tokens("a", [256]):
        num_accepted += 1
        assert num_accepted < 50
    assert watched.refusal == GRAMMAR_TOO_SLOW


@pytest.mark.parametrize(
    "schema", ['{"$ref": "#"}', '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}']
)
def test_a_grammar_that_cannot_begin_is_given_up(schema: str) -> None:
    """Found by changing schemas at random: the engine called it an error of its own."""
    vocabulary = xgrammar.TokenizerInfo([b"{", b"}", b"<end>"], stop_token_ids=[2])
    context = xgrammar.GrammarCompiler(vocabulary).compile_json_schema(schema)
    grammar = XgrammarGrammar(matcher=xgrammar.GrammarMatcher(context), vocab_size=3, ctx=context)
    watched = GrammarWatch().watched(grammar, "a")
    bitmask = torch.full((1, 1), 5, dtype=torch.int32)
    watched.fill_bitmask(bitmask, 0)
    assert watched.refusal == GRAMMAR_ALLOWS_NOTHING
    assert bitmask.tolist() == [[-1]]
    assert not watched.accept_tokens("a", [0])
