"""`GET /metrics` for Prometheus, and `GET /load`."""

import asyncio

from fastapi import APIRouter, Response

from omni_server.api.limits import Admission
from omni_server.api.state import ServerState
from omni_server.metrics.server_metrics import CONTENT_TYPE


def metrics_router(state: ServerState, admission: Admission) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get(
        "/metrics",
        summary="Prometheus metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        state.metrics.event_loop_tasks.set(len(asyncio.all_tasks()))
        text = state.metrics.text()
        if state.generator is not None:
            text += state.generator.metrics_text()
        return Response(text, headers={"content-type": CONTENT_TYPE})

    @router.get("/load", summary="Requests and sessions that run or wait")
    async def load() -> dict[str, int]:
        return {"server_load": admission.num_in_flight}

    return router
