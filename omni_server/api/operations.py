"""Routes for operators: `/health` (restart on failure), `/ready` (send requests), `/live`, `/version`,
`/load`, and `/metrics` for Prometheus."""

import asyncio

from fastapi import APIRouter, Response

from omni_server import __version__
from omni_server.api.limits import Admission
from omni_server.api.openapi import error_responses
from omni_server.api.server_metrics import CONTENT_TYPE
from omni_server.api.state import ServerState


def health_router(state: ServerState, admission: Admission) -> APIRouter:
    router = APIRouter(tags=["probes"])
    failing = error_responses(503)

    @router.head("/health", include_in_schema=False)
    @router.head("/healthz", include_in_schema=False)
    @router.get("/healthz", summary="The same as /health", response_class=Response, responses=failing)
    @router.get("/ping", summary="The same as /health", response_class=Response, responses=failing)
    @router.post("/ping", summary="The same as /health", response_class=Response, responses=failing)
    @router.get(
        "/health",
        summary="200 from readiness on, also while draining or restarting a stage",
        response_class=Response,
        responses=failing,
    )
    async def health() -> Response:
        reason = state.unavailability()
        if reason is not None and reason.code != "server_shutting_down":
            raise reason
        return Response()

    @router.head("/ready", include_in_schema=False)
    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz", summary="The same as /ready", responses=failing)
    @router.get(
        "/ready",
        summary="200 if requests are taken, with the replicas that have failed, else 503 with the reason",
        responses=failing,
    )
    async def ready() -> dict[str, str | tuple[str, ...]]:
        state.require_all_stages()
        admission.check_room()
        failed = state.require_generator().failed_replicas()
        return {"status": "ready"} | ({"failed_replicas": failed} if failed else {})

    @router.head("/live", include_in_schema=False)
    @router.head("/livez", include_in_schema=False)
    @router.get("/livez", summary="The same as /live", response_class=Response)
    @router.get("/live", summary="200 as long as the process answers", response_class=Response)
    async def live() -> Response:
        return Response()

    @router.get("/version", summary="The server's version")
    async def show_version() -> dict[str, str]:
        return {"version": __version__}

    return router


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
