"""Tracks which process holds each block of a queue, in case that process dies.

A block (a portion of a slot) is ended exactly once, by the holder of the message that refers to it. A killed
process ends nothing, and its slots would stay in use forever. All messages pass through the server, so it
knows whether a block is with the producer, the server or the consumer, and ends the blocks of a dead process.

If a block were ended too early, its slot would be reused while a process still reads it; if it were ended
twice, the second time could undo the end of its next use. Both methods that end a process's blocks may
therefore be called only when the process is gone, including all of its workers, and none of its messages can
arrive any more.
"""

from collections.abc import Iterable

from omni_server.protocol.rows import SharedBlock
from omni_server.transport.slab_queue import SlabQueue

_Place = tuple[int, int]  # slot and portion


class BlockLedger:
    """The ledger of one queue, in the server. It stores one generation per place, so its size is bounded."""

    def __init__(self, queue: SlabQueue) -> None:
        self.queue = queue
        self._received: dict[_Place, int] = {}
        self._sent: dict[_Place, tuple[int, int]] = {}  # generation, and the consumer's replica

    def received(self, block: SharedBlock) -> None:
        """The server has received the block from the producer."""
        self._received[block.slot, block.portion] = block.generation

    def sent(self, block: SharedBlock, consumer: int) -> None:
        """The server sends the block to the consumer's replica with the number `consumer`."""
        self._sent[block.slot, block.portion] = block.generation, consumer

    def drop(self, block: SharedBlock) -> None:
        """Ends a block that will not be read, unless it was already ended on behalf of a dead process."""
        if self.queue.is_open(block):
            self.queue.finish_all(block)

    def producer_died(self) -> int:
        """Ends all blocks that the producer published but did not send to the server. Returns how many."""
        return self._end(
            block
            for block in self.queue.published_blocks()
            if self._received.get((block.slot, block.portion)) != block.generation
        )

    def consumer_died(self, consumer: int) -> int:
        """Ends all blocks that this replica of the consumer received but did not end. Returns how many."""
        return self._end(
            SharedBlock(slot, generation, portion, self.queue.number)
            for (slot, portion), (generation, replica) in self._sent.items()
            if replica == consumer
        )

    def _end(self, blocks: Iterable[SharedBlock]) -> int:
        still_open = [block for block in blocks if self.queue.is_open(block)]
        for block in still_open:
            self.queue.finish_all(block)
        return len(still_open)
