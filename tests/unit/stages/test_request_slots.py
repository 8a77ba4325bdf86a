"""Slots of requests, one by one and for a batch at once."""

from stages.runtime.request_slots import UNKNOWN, RequestSlots


def test_requests_of_a_batch_are_found_in_its_order() -> None:
    slots = RequestSlots()
    given = {name: slots.add(name) for name in "abc"}
    assert len(set(given.values())) == 3
    assert slots.of_batch(["c", "x", "a"]).tolist() == [given["c"], UNKNOWN, given["a"]]


def test_a_batch_that_stays_the_same_is_looked_up_once_and_one_that_changes_in_place_again() -> None:
    slots = RequestSlots()
    for name in "abc":
        slots.add(name)
    batch = ["a", "b"]
    first = slots.of_batch(batch)
    assert slots.of_batch(batch) is first
    batch[1] = "c"  # as vLLM does with its list
    assert slots.of_batch(batch).tolist() == [slots.get("a"), slots.get("c")]


def test_a_slot_goes_to_another_request_only_after_its_own_has_gone() -> None:
    slots = RequestSlots()
    slots.add("a")
    kept = slots.add("b")
    assert slots.of_batch(["a", "b"]).tolist() == [slots.get("a"), kept]
    freed = slots.remove("a")
    assert slots.of_batch(["a", "b"]).tolist() == [UNKNOWN, kept]
    assert slots.remove("a") is None
    assert slots.add("c") == freed
    assert slots.of_batch(["a", "b"]).tolist() == [UNKNOWN, kept]
    assert len(slots) == 2
