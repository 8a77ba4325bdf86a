"""A replica of Ray Serve, as Ray Serve drives it, without engines and without Ray."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from omni_server.cli.ray import replica as ray_replica
from omni_server.cli.ray.flags import deployment_of
from omni_server.cli.ray.options import IS_READY
from omni_server.cli.ray.replica import PipelineReplica
from omni_server.errors import ConfigError, StageDownError
from omni_server.types import TextDelta
from tests.unit.api.clients import URL, chat, http_client
from tests.unit.api.fake_generator import MODEL, FakeGenerator, Hang


class FakePipeline:
    """Takes the place of the engines."""

    def __init__(self) -> None:
        self.generator = FakeGenerator()
        self.error: Exception | None = None
        self.is_running = self.has_started = False

    @asynccontextmanager
    async def running(self, *_: object) -> AsyncIterator[FakeGenerator]:
        if self.error is not None:
            raise self.error
        self.is_running = self.has_started = True
        try:
            yield self.generator
        finally:
            self.is_running = False


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> FakePipeline:
    fake = FakePipeline()
    monkeypatch.setattr(ray_replica, "running", fake.running)
    monkeypatch.setattr(ray_replica, "prepare", lambda options, out, config: (Path("/model"), config))
    for name in ("set_up_logging", "raise_descriptor_limit", "return_freed_memory", "set_engine_environment"):
        monkeypatch.setattr(ray_replica, name, lambda *_: None)
    monkeypatch.setattr(ray_replica.fork_server, "import_engine_modules", lambda _: None)
    return fake


def replica_of(*flags: str) -> PipelineReplica:
    options, _, config = deployment_of(["some/model", "--stage-config", "qwen2_5_omni.demo-cpu", *flags])
    return PipelineReplica(options, config)


def key_file(folder: Path, key: str) -> str:
    (folder / "keys").write_text(f"{key}\n")
    return str(folder / "keys")


async def test_it_serves_the_application_of_serve(pipeline: FakePipeline, tmp_path: Path) -> None:
    replica = replica_of("--api-key-file", key_file(tmp_path, "secret"))
    app = await replica.__serve_build_asgi_app__()
    async with app.router.lifespan_context(app), http_client(app) as client:
        assert (await client.post(URL, json=chat())).status_code == 401
        answer = await client.post(URL, json=chat(), headers={"authorization": "Bearer secret"})
        assert answer.json()["model"] == MODEL.name
        assert (await client.get("/ready")).status_code == 200
        await replica.check_health()
        assert pipeline.is_running
    assert not pipeline.is_running


async def test_heads_of_requests_are_bounded_as_in_serve(pipeline: FakePipeline) -> None:
    replica = replica_of("--max-url-size", "50", "--max-header-size", "1K", "--max-header-fields", "20")
    async with http_client(await replica.__serve_build_asgi_app__()) as client:
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/live?" + "x" * 50)).status_code == 414
        assert (await client.get("/live", headers={"x": "x" * 1000})).status_code == 431
        assert (await client.get("/live", headers={f"x-{n}": "x" for n in range(20)})).status_code == 431


async def test_a_pipeline_that_has_died_for_good_is_unhealthy_and_its_requests_end(
    pipeline: FakePipeline,
) -> None:
    pipeline.generator.script = [TextDelta("a", (1,)), Hang()]
    replica = replica_of()
    async with http_client(await replica.__serve_build_asgi_app__()) as client:
        asking = asyncio.create_task(client.post(URL, json=chat()))
        await pipeline.generator.submitted.wait()
        pipeline.generator.alive = False
        for _ in range(3):
            with pytest.raises(RuntimeError, match="A stage of the server has died for good"):
                await replica.check_health()
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert (await client.get("/health")).status_code == 503


async def test_a_pipeline_that_restarts_a_stage_is_not_ready_for_the_router(pipeline: FakePipeline) -> None:
    replica = replica_of()
    assert await replica.record_routing_stats() == {IS_READY: False}
    await replica.__serve_build_asgi_app__()
    assert await replica.record_routing_stats() == {IS_READY: True}
    pipeline.generator.down = StageDownError("talker")
    assert await replica.record_routing_stats() == {IS_READY: False}
    await replica.check_health()


async def test_a_wrong_key_is_told_before_the_engines_start(pipeline: FakePipeline) -> None:
    replica = replica_of()
    replica._options = replace(replica._options, api=replace(replica._options.api, api_keys=("a b",)))
    with pytest.raises(ConfigError, match="API key"):
        await replica.__serve_build_asgi_app__()
    assert not pipeline.has_started
