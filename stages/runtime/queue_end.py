"""Opens a stage's end of an edge's queue."""

from pathlib import Path

from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SlabQueue


def open_queue(spec: QueueSpec | None) -> SlabQueue | None:
    """The mapped queue, or None where the edge has none or passes rows inside the message."""
    if spec is None or spec.path is None:
        return None
    return SlabQueue(
        Path(spec.path),
        capacity=spec.capacity,
        slot_bytes=spec.slot_bytes,
        max_portions=spec.max_portions,
        num_consumers=spec.num_consumers,
    )
