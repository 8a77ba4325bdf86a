"""Requests of the synchronous Python API end with their callers."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from omni_server import offline
from omni_server.generation import Deliver
from omni_server.offline import Omni
from omni_server.omni import AsyncOmni
from omni_server.types import OmniRequest
from tests.unit.api.fake_generator import FakeGeneration, FakeGenerator, Hang

DEADLINE_S = 20.0


class SlowOmni(FakeGenerator):
    """Stands for `AsyncOmni`. It is admitting a request, and nothing else runs in its loop, until `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.is_admitting = threading.Event()

    async def submit(self, request: OmniRequest, deliver: Deliver, _through: Any = None) -> FakeGeneration:
        self.is_admitting.set()
        assert self.go_on.wait(DEADLINE_S)
        return await super().submit(request, deliver)

    events = AsyncOmni.events

    async def stop(self) -> None:
        """It has no engines."""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowOmni]:
    fake = SlowOmni()

    async def start(*_: Any, **__: Any) -> SlowOmni:
        return fake

    monkeypatch.setattr(offline, "resolve_deployment", lambda *_, **__: (None, None))
    monkeypatch.setattr(AsyncOmni, "start", start)
    yield fake
    fake.go_on.set()


async def has_closed(engines: SlowOmni) -> None:
    async with asyncio.timeout(DEADLINE_S):
        # The generation belongs to another event loop.
        while not engines.generations or not engines.generations[0].num_closed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_stream_that_is_cancelled_while_its_request_is_admitted_ends_it(engines: SlowOmni) -> None:
    engines.script = [Hang()]
    with Omni("model") as omni:
        reading = asyncio.ensure_future(anext(omni.stream("hi")))
        await asyncio.to_thread(engines.is_admitting.wait, DEADLINE_S)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        engines.go_on.set()
        await has_closed(engines)
