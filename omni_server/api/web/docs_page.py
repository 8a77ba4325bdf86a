"""The page at `/docs`: Swagger UI on `/openapi.json`, all of it from this server.

FastAPI's own page loads Swagger UI from a CDN: it does not work offline, and it lets a foreign script into the API's
origin. The package `fastapi_offline` carries Swagger UI's files.
"""

from importlib.resources import as_file, files
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from omni_server.api.web.page import load_asset, page_headers, respond

DOCS = "/docs"

_OWN = Path(__file__).parent / "docs"
_SWAGGER_UI = ("swagger-ui.css", "swagger-ui-bundle.js")
_HEADERS = page_headers(
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data:",  # the pictures in Swagger UI's style sheet
    "media-src blob:",  # speech that was tried out
    "connect-src 'self'",
)


def docs_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    page = load_asset(_OWN / "index.html")
    assets = {"start.js": load_asset(_OWN / "start.js")}
    with as_file(files("fastapi_offline") / "static") as folder:
        assets |= {name: load_asset(folder / name) for name in _SWAGGER_UI}

    @router.head(DOCS)
    @router.get(DOCS)
    async def show_docs(request: Request) -> Response:
        return respond(request, page, _HEADERS)

    @router.head(DOCS + "/{name}")
    @router.get(DOCS + "/{name}")
    async def show_docs_asset(request: Request, name: str) -> Response:
        if name not in assets:
            raise HTTPException(404)
        return respond(request, assets[name], _HEADERS)

    return router
