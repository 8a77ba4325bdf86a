"""No key reaches the log through the web server, at no level."""

import logging
from dataclasses import replace

import pytest
import websockets

from tests.unit.api.test_auth import KEY
from tests.unit.api.test_server import QUIET, Life, client_of, served


@pytest.mark.parametrize("level", ["info", "debug", "trace"])
@pytest.mark.parametrize("access_log", [True, False])
async def test_no_key_of_a_handshake_is_logged(
    level: str, access_log: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(1)
    life = Life()
    async with served(life, replace(QUIET, api_keys=(KEY,), log_level=level, access_log=access_log)):
        url = life.address.replace("http", "ws", 1) + f"/v1/realtime?model=omni&api-key={KEY}"
        async with websockets.connect(url, additional_headers={"Authorization": f"Bearer {KEY}"}) as session:
            await session.recv()
        protocols = [websockets.Subprotocol(name) for name in ("realtime", f"openai-insecure-api-key.{KEY}")]
        async with websockets.connect(url, subprotocols=protocols) as session:
            await session.recv()
        with pytest.raises(websockets.InvalidStatus):
            await websockets.connect(url, additional_headers={"Authorization": f"Bearer {KEY}x"})
        async with client_of(life.address) as client:
            await client.get(f"/v1/models?api-key={KEY}", headers={"Authorization": f"Bearer {KEY}"})
    server_side = [
        record for record in caplog.records if not record.name.startswith(("websockets", "http", "hpack"))
    ]  # the others are the client's, in this same process
    assert [record for record in server_side if record.name.startswith("uvicorn")] or level == "info"
    lines = [f"{record.name}: {record.getMessage()}" for record in server_side]
    assert not [line for line in lines if KEY in line or "api-key=" in line]
    if access_log:
        assert any("GET /v1/models 200" in line for line in lines)


async def test_warnings_of_the_web_server_are_still_written(caplog: pytest.LogCaptureFixture) -> None:
    async with served(Life()):
        logging.getLogger("uvicorn.error").warning("something")
    assert "something" in caplog.text
