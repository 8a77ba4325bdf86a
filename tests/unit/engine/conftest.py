import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.engine import engine_handle, supervisor
from tests.unit.engine.simulated_engine import World


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    async def close_frontend(engine: AsyncLLM) -> bool:
        world.events.append("frontend closed")
        return True

    world = World()
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    monkeypatch.setattr(supervisor, "LACK_BACKOFF_S", 0.001)
    monkeypatch.setattr(engine_handle, "close_frontend", close_frontend)
    return world
