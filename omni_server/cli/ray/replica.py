"""A whole pipeline as a replica of a Ray Serve deployment.

A replica is one actor. It runs the ASGI application of `omni-server serve`, and its engines are its child
processes, which end with it even after `kill -9`. Embeddings never pass through Ray.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from fastapi import FastAPI

from omni_server.api.app import create_app
from omni_server.api.images.sizes import check_size_limits
from omni_server.api.state import ServerState
from omni_server.api.tracing import open_tracer
from omni_server.cli.pipeline import prepare, running
from omni_server.cli.process import raise_descriptor_limit, return_freed_memory
from omni_server.cli.ray.options import IS_READY
from omni_server.cli.serve_flags import ServeOptions
from omni_server.config.stage_config import StageConfig
from omni_server.engine import fork_server
from omni_server.engine.environment import set_engine_environment
from omni_server.errors import OmniError, StageDeadError
from omni_server.family import load_family
from omni_server.platform.log_format import set_up_logging

logger = logging.getLogger(__name__)


class PipelineReplica:
    """Has the methods that Ray Serve looks for. The class decorated by `serve.ingress` is the replica."""

    def __init__(self, options: ServeOptions, stage_config: StageConfig) -> None:
        self._options = options
        self._stage_config = stage_config
        self._state = ServerState()
        self._held = AsyncExitStack()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Starts the engines, and returns the application when they have been warmed up. The shutdown of its
        lifespan ends them.

        Raises `ConfigError`, which `serve status` shows.
        """
        options = self._options
        set_up_logging(options.log_level, options.log_format)
        raise_descriptor_limit()
        return_freed_memory()
        on_progress = partial(logger.info, "%s")
        async with AsyncExitStack() as held:
            tracing = open_tracer(options.api.otlp_traces_endpoint)
            if tracing is not None:
                self._state.tracer = await held.enter_async_context(tracing)
            app = create_app(self._state, options.api, self._lifespan)  # checks keys before minutes are spent
            model_dir, config = await asyncio.to_thread(prepare, options, on_progress, self._stage_config)
            set_engine_environment(config)
            await asyncio.to_thread(fork_server.import_engine_modules, load_family(config.model_family))
            omni = await held.enter_async_context(running(options, model_dir, config, on_progress))
            check_size_limits(omni.model_info, options.api)
            self._held = held.pop_all()
        self._state.generator = omni
        return app

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        async with self._held:
            yield

    async def record_routing_stats(self) -> dict[str, bool]:
        """Tells the router whether `/ready` is 200 but for the number of requests."""
        try:
            self._state.require_all_stages()
        except OmniError:
            return {IS_READY: False}
        return {IS_READY: True}

    async def check_health(self) -> None:
        """Fails as `/health` does, when a stage has died for good."""
        reason = self._state.unavailability()
        if reason is None:
            return
        if self._state.abort_error is None:
            assert self._state.generator is not None
            down = self._state.generator.stage_down()
            stage = "engine" if down is None else down.stage
            logger.error("stage '%s' has died for good; Ray Serve replaces this replica", stage)
            self._state.abort(StageDeadError(stage, "it has died for good"))
        raise RuntimeError(str(reason))
