"""Sessions of `/v1/realtime` beside the other load.

Their answers are sampled without a seed: what is checked is that each is whole and that every event is
well-formed.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from tests.integration.server_process import MODEL
from tests.load.mixed_load import DOWN_CODES, PATIENCE_S, TIMEOUT_S, Faults
from tests.load.tally import Tally
from tests.load.wire import HOST
from tests.unit.api.realtime.realtime_client import Event, check_event

_KIND = "realtime"


async def realtime_client(
    port: int, tally: Tally, go_on: Callable[[], bool], *, abort_share: float, seed: int, faults: Faults
) -> None:
    """One session after the other, each with one response, some left in the middle of it."""
    chance = random.Random(seed)
    usual_s = 2.0
    number = 0
    while go_on():
        number += 1
        tally.sent += 1
        name = f"session {seed}-{number}"
        leaves_after_s = chance.uniform(0, 1.2 * usual_s) if chance.random() < abort_share else TIMEOUT_S
        began = time.monotonic()
        try:
            async with asyncio.timeout(leaves_after_s):
                failure = await _session(port, chance.choice(("Hello", "Count to ten.", "What is that?")))
        except TimeoutError:
            if leaves_after_s < TIMEOUT_S:
                tally.aborted += 1
                tally.aborted_by_kind[_KIND] += 1
            else:
                tally.lost.append(f"{name}: no answer for {TIMEOUT_S:g} s")
            continue
        except (WebSocketException, OSError) as error:
            tally.lost.append(f"{name}: {error!r}")
            continue
        except (AssertionError, KeyError) as error:
            tally.wrong.append(f"{name}: {error!r}"[:500])
            continue
        if failure is None:
            tally.exact += 1
            tally.by_kind[_KIND] += 1
            usual_s += 0.1 * (time.monotonic() - began - usual_s)
        elif failure in DOWN_CODES and faults.excuse(began, time.monotonic()):
            tally.excused[failure] += 1
            await asyncio.sleep(PATIENCE_S)
        else:
            tally.wrong.append(f"{name}: failed with {failure}")


async def _session(port: int, text: str) -> str | None:
    """Why the response failed, None if it is whole."""
    ids: set[str] = set()
    uri = f"ws://{HOST}:{port}/v1/realtime?model={MODEL}"
    async with connect(uri, max_size=None, compression=None, proxy=None) as socket:

        async def until(*kinds: str) -> Event:
            while True:
                event: Event = json.loads(await socket.recv())
                check_event(event, ids)
                if event["type"] in kinds:
                    return event

        await until("session.created")
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
        await until("conversation.item.done")
        await socket.send(json.dumps({"type": "response.create", "response": {"max_output_tokens": 30}}))
        event = await until("response.done", "error")
        if event["type"] == "error":
            return str(event["error"]["code"])
        response = event["response"]
        if response["status"] == "failed":
            return str(response["status_details"]["error"]["code"])
        assert response["status"] in ("completed", "incomplete"), response["status"]
        return None
