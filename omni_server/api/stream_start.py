"""Streams whose first piece is made before their status is sent, and what becomes of a failure after that."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from omni_server.api.errors import envelope, logged, unexpected_error
from omni_server.api.sse import frame
from omni_server.errors import OmniError

logger = logging.getLogger(__name__)


async def joined(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """`first`, unless it is empty, then `rest`, which whoever made it must close: this may never begin."""
    if first:
        yield first
    async for data in rest:
        yield data


async def ending_in_error(frames: AsyncGenerator[bytes, None], name: str) -> AsyncGenerator[bytes, None]:
    """Where `frames` fail, the last one holds the error. `name` is what the log calls the stream."""
    try:
        async with aclosing(frames):
            async for data in frames:
                yield data
    except OmniError as error:
        logger.info("%s failed while it was streamed: %s", name, logged(error))
        yield frame(envelope(error))
    except Exception:
        logger.exception("%s failed while it was streamed", name)
        yield frame(envelope(unexpected_error()))
