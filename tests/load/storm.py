"""Requests of every modality, about half of which are aborted at random moments."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from tests.faults.supervised_server import SupervisedServer
from tests.load.answers import Answer
from tests.load.census import Census, leaks
from tests.load.mixed_load import Faults, MixedLoad, changed, times
from tests.load.realtime_load import realtime_client
from tests.load.soak import port_of
from tests.load.tally import Tally
from tests.load.wire import Ask

_MEANT_TO_LEAVE = 0.7
"""Of the clients. Their moment is drawn beforehand, and for a quarter of them the answer is whole by then."""


@dataclass(frozen=True)
class StormResult:
    tally: Tally
    leaked: dict[str, tuple[float, float]]
    """What was before and is after, where it differs."""
    changed: list[str]
    """Kinds of requests that, asked again afterwards, got another answer than before."""


async def storm(
    server: SupervisedServer,
    wanted: Mapping[Ask, Answer],
    before: Census,
    *,
    number: int,
    concurrency: int,
    seed: int,
) -> StormResult:
    """`wanted` and `before` as `tests.load.soak.warm_up` returns them. One more client talks over
    `/v1/realtime`."""
    port = port_of(server)
    load = MixedLoad(port, wanted, abort_share=_MEANT_TO_LEAVE, seed=seed)
    tally = load.tally
    goes_on = times(number)
    talking = realtime_client(port, tally, goes_on, abort_share=0.5, seed=seed, faults=Faults())
    await asyncio.gather(talking, load.run(concurrency, goes_on))
    with server.client() as client:
        await asyncio.to_thread(server.wait_until_idle)
        leaked = await asyncio.to_thread(leaks, server, client, before)
    return StormResult(tally, leaked, await changed(port, wanted, concurrency))
