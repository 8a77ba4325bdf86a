"""Messages on an edge with embeddings: rows of hidden states by absolute position, and their metadata.

A *row* is one input vector of the consuming stage, `[width]`. The producer's worker writes the rows of one
step into one slab; per request, a `RowsPayload` gives their places. The orchestrator passes on the encoded
payload, wrapped in a `RowsFeed`, without opening the slab.

On an edge with text ids (`omni_server.config.pipeline.Embeddings`), the consumer has a row for each text
token. The orchestrator sends ids, and only positions of media have rows of the producer.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

RowDtype = Literal["float32", "bfloat16", "float16"]

REQUEST_KEY = "omni_rows"
"""Key in `SamplingParams.extra_args` that carries an encoded `RowsOutput`, `RowsInput` or `RowsFeed`."""


class SourceSpan(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive positions of the producer's prompt that are consecutive in the consumer's prompt, too."""

    source_first: int
    """Position of the first one in the producer's prompt."""
    target_first: int
    """Position of the first one in the consumer's prompt."""
    count: int
    has_rows: bool
    """The producer sends the rows of these positions. Otherwise, their tokens are text."""


class RowsOutput(msgspec.Struct, frozen=True, tag="output", forbid_unknown_fields=True):
    """Asks the producing stage to send the rows of this request."""

    voice: str
    num_reply: int = 0
    """This many of the prompt's last tokens count as generated: a given reply, not a sampled one."""
    spans: tuple[SourceSpan, ...] | None = None
    """In the order of both prompts, without overlap: what the consumer's prompt has of the producer's. Only
    rows of spans with `has_rows` are sent, at the consumer's positions, without boundary and tail. None: the
    rows of all positions are sent."""


class RowsInput(msgspec.Struct, frozen=True, tag="input", forbid_unknown_fields=True):
    """Announces to the consuming stage that rows will arrive for this request."""

    num_replaced: int
    """Rows below this position replace the token embedding; later rows are added to it."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows in a block."""

    first_position: int
    """Position in the consumer's sequence of the first row."""
    num_rows: int
    offset: int
    """Bytes from the start of the block."""


class TextSegment(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows that the consumer looks up."""

    first_position: int
    """Position in the consumer's sequence of the first row."""
    token_ids: tuple[int, ...]
    """Ids in the vocabulary of the consumer's row table."""

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


class ComposedSegment(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive rows that the consumer's model composes (`stages.runtime.embeddings_in.ComposesRows`)."""

    first_position: int
    num_rows: int
    data: bytes
    """What they are composed of, in the family's own encoding."""


class SharedBlock(msgspec.Struct, frozen=True, tag="shared", array_like=True):
    """A block inside a slot of a shared-memory queue of the edge; one portion of the slot belongs to it."""

    slot: int
    generation: int
    """Number of the slot's use, which identifies stale references."""
    portion: int
    queue: int = 0
    """Which of the edge's queues: that of the producer's replica with this number."""


class InlineBlock(msgspec.Struct, frozen=True, tag="inline", array_like=True):
    """The bytes themselves."""

    data: bytes


class RowsPayload(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The rows of one request that one step of the producer computed.

    `additional_information` of the edge travels with them: the M-RoPE positions of the consumer's prompt, the
    row that follows the last one, and the length of the prompt.
    """

    prompt_length: int
    """Tokens of the producer's prompt."""
    num_generated_rows: int
    """Rows of generated tokens that exist once this payload has arrived."""
    width: int
    dtype: RowDtype
    block: SharedBlock | InlineBlock
    segments: tuple[Segment, ...]
    tail: Segment | None = None
    """Rows to use after the last one, once the producer has finished: each in turn, the last one forever.
    Sent with a request's first payload; its `first_position` has no meaning."""
    positions_offset: int | None = None
    """Offset of the M-RoPE positions in the block: float32 `[3, num_positions]`, for the payload's first
    segments. Behind those of a segment's rows is where text that follows it begins. Other rows of the prompt
    are text with consecutive positions, from 0 or from there on."""
    num_positions: int = 0


class RowsFeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Orchestrator -> consumer, for a request announced with `RowsInput`."""

    payload: RowsPayload | None = None
    num_released: int | None = None
    """Rows that may be consumed so far; None: all that have arrived."""
    final_length: int | None = None
    """Set only by the last feed: the sequence has this many rows, after which the tail begins."""
    text: tuple[TextSegment, ...] = ()
    """Rows that precede, separate or follow those of the payload."""
    composed: tuple[ComposedSegment, ...] = ()
    """Rows that the consumer's model composes, such as all of its prompt."""
    tail_ids: tuple[int, ...] = ()
    """The tail (`RowsPayload.tail`) as text; sent with the first feed."""

    @property
    def segments(self) -> list[Segment | TextSegment | ComposedSegment]:
        """All rows of the feed, by position. They must continue where the earlier rows end, without gaps."""
        rows = () if self.payload is None else self.payload.segments
        return sorted((*rows, *self.text, *self.composed), key=lambda segment: segment.first_position)

    @property
    def shared_block(self) -> SharedBlock | None:
        """The reference to shared memory that travels with the feed."""
        block = None if self.payload is None else self.payload.block
        return block if isinstance(block, SharedBlock) else None


AddressedFeed = tuple[str, RowsFeed]
"""A feed and the engine's own id of its request. One message to a consuming stage contains all feeds that
result from one step of the producer."""

FEEDS_KEY = "omni_row_feeds"
"""Key in `SamplingParams.extra_args` of the message that carries encoded feeds instead of a request."""

FEEDS_REQUEST_ID = "omni-row-feeds"
"""Id of that message. It is not a request: the stage's scheduler unpacks it and forgets it."""

RowsRequest = RowsOutput | RowsInput

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(RowsRequest)
_payload_decoder = msgspec.msgpack.Decoder(RowsPayload)
_feeds_decoder = msgspec.msgpack.Decoder(tuple[AddressedFeed, ...])

# The decoders raise `msgspec.ValidationError` naming the field that does not fit.


def encode(message: RowsRequest | RowsPayload) -> bytes:
    return _encoder.encode(message)


def encode_feeds(feeds: Sequence[AddressedFeed]) -> bytes:
    return _encoder.encode(feeds)


def decode_request(data: bytes) -> RowsRequest:
    return _request_decoder.decode(data)


def decode_payload(data: bytes | memoryview) -> RowsPayload:
    return _payload_decoder.decode(data)


def decode_feeds(data: bytes) -> tuple[AddressedFeed, ...]:
    """Returns the feeds in the order in which they were encoded."""
    return _feeds_decoder.decode(data)
