"""Callers take tickets: numbers of requests, and what the stages are given."""

import math

from omni_server.orchestrator.fair_share import FairShareQueue, FairShareTicket, WindowFairness


def numbers(tickets: list[FairShareTicket]) -> list[int]:
    return [ticket.number for ticket in tickets]


def test_requests_of_one_caller_keep_their_order() -> None:
    tickets = FairShareQueue()
    first = [tickets.take("a") for _ in range(3)]
    first[0].begin()
    first[0].end()
    assert numbers([*first, tickets.take("a")]) == [0, 1, 2, 3]


def test_another_caller_waits_for_no_request_that_has_not_begun() -> None:
    tickets = FairShareQueue()
    busy = [tickets.take("busy") for _ in range(100)]
    for ticket in busy[:8]:
        ticket.begin()
    patient = [tickets.take("patient") for _ in range(3)]
    assert numbers(patient) == numbers(busy[7:10])  # one of each in ticket


def test_a_caller_gains_nothing_by_having_been_idle() -> None:
    tickets = FairShareQueue()
    tickets.take("idle").end()
    busy = [tickets.take("busy") for _ in range(10)]
    for ticket in busy[:5]:
        ticket.begin()
        ticket.end()
    idle = [tickets.take("idle") for _ in range(4)]
    assert numbers(idle) == numbers(busy[4:8])


def test_requests_that_follow_each_other_do_not_overtake_one_that_waits() -> None:
    tickets = FairShareQueue()
    waiting = [tickets.take("a") for _ in range(2)]
    sequential = []
    for _ in range(5):
        sequential.append(tickets.take("b"))
        sequential[-1].begin()
        sequential[-1].end()
    assert numbers(waiting) == [0, 1]
    assert numbers(sequential) == [0, 1, 2, 3, 4]


def test_a_second_request_gets_its_turn_beside_callers_that_always_have_one() -> None:
    """One request is computed at a time."""
    tickets = FairShareQueue()
    waiting = [
        ("a", tickets.take("a")),
        ("a", tickets.take("a")),
        ("b", tickets.take("b")),
        ("c", tickets.take("c")),
    ]
    order = []
    for _ in range(8):
        caller, ticket = min(waiting, key=lambda entry: entry[1].number)
        waiting.remove((caller, ticket))
        order.append(caller)
        ticket.begin()
        ticket.end()
        if caller != "a":
            waiting.append((caller, tickets.take(caller)))
    assert order == ["a", "b", "c", "a", "b", "c", "b", "c"]


def test_a_caller_without_requests_is_forgotten() -> None:
    tickets = FairShareQueue()
    for ticket in [tickets.take("a") for _ in range(3)]:
        assert tickets.take("b").number == ticket.number
        ticket.end()
        ticket.end()  # harmless
    assert numbers([tickets.take("a"), tickets.take("b")]) == [0, 3]


def test_a_window_does_not_pass_the_one_before_it_in_its_stream() -> None:
    tickets = WindowFairness()
    for _ in range(20):
        tickets.enter("busy", 0.9, 0.0, not_before=-math.inf)
    first = tickets.enter("patient", 1.5, 0.5, not_before=-math.inf)
    second = tickets.enter("patient", 1.7, 1.2, not_before=first)
    assert (first, second) == (1.5, 1.5)
