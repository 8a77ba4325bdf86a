"""Streams whose first piece is made before their status is sent."""

from collections.abc import AsyncGenerator


async def joined(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """`first`, unless it is empty, then `rest`, which whoever made it must close: this may never begin."""
    if first:
        yield first
    async for data in rest:
        yield data
