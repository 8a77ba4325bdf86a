"""Room for the media of requests that are being answered."""

import asyncio

import pytest

from omni_server.api.media_room import MediaRoom
from omni_server.errors import OverloadedError


async def test_who_finds_no_room_waits_until_enough_was_given_back() -> None:
    room = MediaRoom("recordings", 10, timeout_s=30)
    give_back_six, give_back_four = await room.take(6), await room.take(4)
    waiting = asyncio.create_task(room.take(8))
    await asyncio.sleep(0)
    give_back_four()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    give_back_six()
    give_back_eight = await asyncio.wait_for(waiting, 10)
    (await room.take(2))()
    give_back_eight()
    (await room.take(10))()


async def test_who_waits_too_long_is_told_that_the_server_is_busy() -> None:
    room = MediaRoom("recordings", 10, timeout_s=0.01)
    give_back = await room.take(10)
    with pytest.raises(OverloadedError):
        await room.take(1)
    give_back()
    (await room.take(10))()


async def test_who_leaves_while_waiting_takes_nothing() -> None:
    room = MediaRoom("recordings", 10, timeout_s=30)
    give_back = await room.take(10)
    waiting = asyncio.create_task(room.take(10))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    give_back()
    (await room.take(10))()
