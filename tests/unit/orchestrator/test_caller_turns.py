"""Callers take turns: numbers of requests, and what the stages are given."""

import math

from omni_server.orchestrator.caller_turns import CallerTurns, Turn, WindowTurns


def numbers(turns: list[Turn]) -> list[int]:
    return [turn.number for turn in turns]


def test_requests_of_one_caller_keep_their_order() -> None:
    turns = CallerTurns()
    first = [turns.take("a") for _ in range(3)]
    first[0].begin()
    first[0].end()
    assert numbers([*first, turns.take("a")]) == [0, 1, 2, 3]


def test_another_caller_waits_for_no_request_that_has_not_begun() -> None:
    turns = CallerTurns()
    busy = [turns.take("busy") for _ in range(100)]
    for turn in busy[:8]:
        turn.begin()
    patient = [turns.take("patient") for _ in range(3)]
    assert numbers(patient) == numbers(busy[7:10])  # one of each in turn


def test_a_caller_gains_nothing_by_having_been_idle() -> None:
    turns = CallerTurns()
    turns.take("idle").end()
    busy = [turns.take("busy") for _ in range(10)]
    for turn in busy[:5]:
        turn.begin()
        turn.end()
    idle = [turns.take("idle") for _ in range(4)]
    assert numbers(idle) == numbers(busy[4:8])


def test_requests_that_follow_each_other_do_not_overtake_one_that_waits() -> None:
    turns = CallerTurns()
    waiting = [turns.take("a") for _ in range(2)]
    sequential = []
    for _ in range(5):
        sequential.append(turns.take("b"))
        sequential[-1].begin()
        sequential[-1].end()
    assert numbers(waiting) == [0, 1]
    assert numbers(sequential) == [0, 1, 2, 3, 4]


def test_a_second_request_gets_its_turn_beside_callers_that_always_have_one() -> None:
    """One request is computed at a time."""
    turns = CallerTurns()
    waiting = [("a", turns.take("a")), ("a", turns.take("a")), ("b", turns.take("b")), ("c", turns.take("c"))]
    order = []
    for _ in range(8):
        caller, turn = min(waiting, key=lambda entry: entry[1].number)
        waiting.remove((caller, turn))
        order.append(caller)
        turn.begin()
        turn.end()
        if caller != "a":
            waiting.append((caller, turns.take(caller)))
    assert order == ["a", "b", "c", "a", "b", "c", "b", "c"]


def test_a_caller_without_requests_is_forgotten() -> None:
    turns = CallerTurns()
    for turn in [turns.take("a") for _ in range(3)]:
        assert turns.take("b").number == turn.number
        turn.end()
        turn.end()  # harmless
    assert numbers([turns.take("a"), turns.take("b")]) == [0, 3]


def test_a_window_does_not_pass_the_one_before_it_in_its_stream() -> None:
    turns = WindowTurns()
    for _ in range(20):
        turns.enter("busy", 0.9, 0.0, not_before=-math.inf)
    first = turns.enter("patient", 1.5, 0.5, not_before=-math.inf)
    second = turns.enter("patient", 1.7, 1.2, not_before=first)
    assert (first, second) == (1.5, 1.5)
