"""Feeds leave together, in order, and are dropped if nobody takes them."""

import asyncio
from collections.abc import Sequence

import pytest

from omni_server.engine.feed_outbox import FeedOutbox
from omni_server.errors import StageDeadError
from omni_server.protocol.rows import AddressedFeed, InlineBlock, RowsFeed, RowsPayload, Segment, SharedBlock
from tests.unit.orchestrator.fake_stages import settle


class Talker:
    """Takes messages as the socket does: before it waits for anything."""

    def __init__(self) -> None:
        self.messages: list[Sequence[AddressedFeed]] = []
        self.error: BaseException | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def send(self, feeds: Sequence[AddressedFeed]) -> None:
        if self.error is not None:
            raise self.error
        self.messages.append(feeds)
        await self.gate.wait()


def rows(slot: int) -> RowsFeed:
    return RowsFeed(RowsPayload(3, 0, 4, "float32", SharedBlock(slot, 1, 0), (Segment(0, 1, 0),)))


async def test_what_comes_in_one_turn_leaves_as_one_message() -> None:
    talker = Talker()
    outbox = FeedOutbox(talker.send, list[SharedBlock]().append, list[str]().append)
    for request_id, slot in [("a", 0), ("b", 1), ("a", 2)]:
        outbox.put((request_id, rows(slot)))
    assert talker.messages == [], "sent before the turn was over"
    await settle()
    assert talker.messages == [[("a", rows(0)), ("b", rows(1)), ("a", rows(2))]]
    outbox.put(("b", RowsFeed(final_length=9)))
    await settle()
    assert talker.messages[1:] == [[("b", RowsFeed(final_length=9))]]


async def test_the_end_of_whoever_put_a_feed_does_not_interrupt_it() -> None:
    """The race that lost a slot: a request is cancelled exactly while its feed is handed over."""
    talker = Talker()
    talker.gate.clear()
    dropped: list[SharedBlock] = []
    failed: list[str] = []
    outbox = FeedOutbox(talker.send, dropped.append, failed.append)

    async def request() -> None:
        outbox.put(("a", rows(0)))
        await asyncio.sleep(3600)

    running = asyncio.create_task(request())
    await asyncio.sleep(0)
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0)
    assert running.cancelled()
    talker.gate.set()
    await settle()
    assert talker.messages == [[("a", rows(0))]]
    assert dropped == [], "the stage has it and ends it"


@pytest.mark.parametrize(
    ("error", "num_failed"),
    [
        (StageDeadError("talker", "its engine process has died"), 0),  # which fails its requests itself
        (BufferError("unforeseen"), 2),
        (asyncio.CancelledError(), 2),
    ],
)
async def test_what_nobody_took_is_dropped_its_requests_fail_and_later_feeds_are_tried_again(
    error: BaseException, num_failed: int
) -> None:
    talker = Talker()
    talker.error = error
    dropped: list[SharedBlock] = []
    failed: list[str] = []
    outbox = FeedOutbox(talker.send, dropped.append, failed.append)
    inline = RowsFeed(RowsPayload(3, 0, 4, "float32", InlineBlock(b"rows"), (Segment(0, 1, 0),)))
    for feed in (rows(0), RowsFeed(num_released=4), inline, rows(1)):
        outbox.put(("a", feed))
    outbox.put(("b", RowsFeed(num_released=4)))
    await settle()
    assert dropped == [SharedBlock(0, 1, 0), SharedBlock(1, 1, 0)]
    assert sorted(failed) == ["a", "b"][:num_failed]
    talker.error = None
    outbox.put(("a", rows(2)))
    await settle()
    assert talker.messages == [[("a", rows(2))]]
