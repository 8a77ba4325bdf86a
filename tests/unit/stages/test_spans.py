"""A producer that sends only the rows of media, at the positions that these have in the consumer's prompt."""

from collections.abc import Iterator

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from omni_server.protocol.rows import (
    RowsFeed,
    RowsInput,
    RowsOutput,
    RowsPayload,
    SharedBlock,
    SourceSpan,
    TextSegment,
)
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.embedding_store import RowStore
from stages.runtime.embeddings_out import consumer_prompt, last_sent
from tests.unit.stages.row_stream import WIDTH, Producer, Spoken, inline_spec, shared_queue, stored_rows

# A source prompt of 12 tokens: two of another turn, a turn with media, one without, and one with media.
#   source 0 1 | 2 M M M 6 | 7 8 | 9 M 11      target 0 1 2 3 4 | 5 6 7
SPANS = (
    SourceSpan(2, 0, 1, has_rows=False),
    SourceSpan(3, 1, 3, has_rows=True),
    SourceSpan(6, 4, 1, has_rows=False),
    SourceSpan(9, 5, 1, has_rows=False),
    SourceSpan(10, 6, 1, has_rows=True),
    SourceSpan(11, 7, 1, has_rows=False),
)
LENGTH = 12
MEDIA = {1: 3, 2: 4, 3: 5, 6: 10}  # target -> source
# The second turn's text begins below the greatest position of the first turn's media.
POSITIONS = torch.tensor([0, 1, 2.5, 4, 3.5, 4.5, 5.5, 6.5, 7.5]).expand(3, -1)


@pytest.fixture(params=["inline", "shared_memory"])
def producer(request: pytest.FixtureRequest) -> Iterator[tuple[Producer, SlabQueue | None]]:
    if request.param == "inline":
        yield Producer(inline_spec(), None), None
        return
    spec, queue = shared_queue()
    yield Producer(spec, queue), queue
    queue.close()


def sending(producer: Producer, request_id: str = "r", *, seed: int = 0) -> Spoken:
    made = Spoken(request_id, [1] * LENGTH, 6, seed=seed)
    output = RowsOutput(voice="Ada", spans=SPANS)
    producer.emitter.add(request_id, output, made.prompt, set(), POSITIONS)
    return made


def with_text(payload: RowsPayload, next_row: int) -> tuple[RowsFeed, int]:
    """The feed that the server makes of a payload: text of id 0 up to its rows, and between them."""
    text = []
    for segment in payload.segments:
        if segment.first_position > next_row:
            text.append(TextSegment(next_row, (0,) * (segment.first_position - next_row)))
        next_row = segment.first_position + segment.num_rows
    return RowsFeed(payload, text=tuple(text)), next_row


@pytest.mark.parametrize("counts", [[12], [5, 5, 2], [1] * 12])
def test_the_rows_of_media_arrive_at_the_consumers_positions(
    producer: tuple[Producer, SlabQueue | None], counts: list[int]
) -> None:
    made, queue = producer
    spoken = sending(made)
    store, position, next_row = RowStore(() if queue is None else (queue,), 0), 0, 0
    store.use_table(torch.zeros(1, WIDTH))
    store.announce("r", RowsInput(num_replaced=0))
    for count in [*counts, 1, 1]:
        payloads = made.step([(spoken, position, count)])
        if payloads:
            feed, next_row = with_text(payloads["r"], next_row)
            store.add("r", feed)
        position += count
    assert next_row == 7
    rows = stored_rows(store, "r", 0, 7)
    for target in range(7):
        source = MEDIA.get(target)
        expected = torch.zeros(WIDTH) if source is None else (spoken.hidden + spoken.embeds)[source]
        assert torch.equal(rows[target], expected)
    given = store.get("r").prompt_positions(10)  # type: ignore[union-attr]
    assert given is not None
    assert given.tolist() == [[*POSITIONS[0].tolist(), 8.5]] * 3
    assert queue is None or queue.num_in_use() == 0


def test_a_payload_of_media_has_neither_boundary_nor_tail(
    producer: tuple[Producer, SlabQueue | None],
) -> None:
    made, _ = producer
    payload = made.step([(sending(made), 0, LENGTH)])["r"]
    assert [(s.first_position, s.num_rows) for s in payload.segments] == [(1, 3), (6, 1)]
    assert payload.tail is None
    assert payload.num_generated_rows == 0


def test_steps_without_media_send_nothing_and_preempted_ones_send_nothing_again(
    producer: tuple[Producer, SlabQueue | None],
) -> None:
    made, queue = producer
    spoken = sending(made)
    assert made.step([(spoken, 0, 3)]) == {}
    (first,) = made.step([(spoken, 3, 2)]).values()
    if queue is not None:
        assert isinstance(first.block, SharedBlock)
        queue.finish_all(first.block)
    assert made.step([(spoken, 0, 5)]) == {}  # preempted
    (rest,) = made.step([(spoken, 5, 7)]).values()
    assert [(s.first_position, s.num_rows) for s in rest.segments] == [(3, 1), (6, 1)]
    for position in range(LENGTH, LENGTH + 3):
        assert made.step([(spoken, position, 1)]) == {}
    assert queue is None or queue.num_in_use() == 1


def test_the_last_row_that_is_sent_is_that_of_the_last_media() -> None:
    assert last_sent(RowsOutput("Ada", spans=SPANS)) == 11
    assert last_sent(RowsOutput("Ada", spans=SPANS[:1])) == 0
    assert last_sent(RowsOutput("Ada")) == float("inf")


# -- media in the consumer's prompt


def image(offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", str(offset), PlaceholderRange(offset=offset, length=length))


def test_a_consumer_without_spans_has_the_producers_prompt() -> None:
    features = [image(4, 4)]
    assert consumer_prompt(11, features, None) == (11, features)


def test_media_move_with_their_span_and_those_of_other_turns_are_left_out() -> None:
    """Text may precede them."""
    length, (feature,) = consumer_prompt(
        20, [image(4, 4), image(12, 3)], (SourceSpan(4, 7, 4, has_rows=True),)
    )
    assert (length, feature.mm_position.offset, feature.mm_position.length) == (11, 7, 4)
