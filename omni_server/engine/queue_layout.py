"""Sizes an edge's queue. Does not import vLLM: `omni-server check` uses it without starting anything."""

from omni_server.config.stage_config import Edge, StageConfig
from omni_server.family import FamilyModel
from omni_server.protocol.runtime_config import QueueSpec

POSITION_BYTES = 12
"""M-RoPE position of one prompt token: three float32."""


def queue_layout(config: StageConfig, edge: Edge, model: FamilyModel) -> QueueSpec:
    """Sizes a slot for the rows of the producer's largest step. Sets no path: there is no file yet."""
    producer, consumer = config.stages[edge.source], config.stages[edge.target]
    dtype = model.dtype_name() if producer.dtype == "auto" else producer.dtype
    row_bytes = model.row_width * (4 if dtype == "float32" else 2)
    return QueueSpec(
        capacity=edge.queue.capacity,
        path=None,
        slot_bytes=producer.max_num_batched_tokens * (row_bytes + POSITION_BYTES)
        + producer.max_num_seqs * (model.extra_rows_per_request * row_bytes + POSITION_BYTES),
        max_portions=producer.max_num_seqs,
        num_consumers=consumer.num_ranks,
    )
