"""One message to a consuming stage: what one step of the producer means for all the requests it feeds."""

from collections.abc import Sequence

import msgspec

from omni_server.protocol.rows import RowsFeed

FEEDS_KEY = "omni_row_feeds"
"""Key in `SamplingParams.extra_args` of the message that carries encoded feeds instead of a request."""

FEEDS_REQUEST_ID = "omni-row-feeds"
"""Id of that message. It is no request: the stage's scheduler takes it apart and forgets it."""

AddressedFeed = tuple[str, RowsFeed]
"""A feed and the engine's own id of the request it is for."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[AddressedFeed, ...])


def encode_feeds(feeds: Sequence[AddressedFeed]) -> bytes:
    return _encoder.encode(feeds)


def decode_feeds(data: bytes) -> tuple[AddressedFeed, ...]:
    """In the order in which they were encoded. Raises `msgspec.ValidationError` naming the field that does
    not fit."""
    return _decoder.decode(data)
