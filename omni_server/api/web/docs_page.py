"""The page at `/docs`: Swagger UI on `/openapi.json`, all of it from this server.

FastAPI's own page loads Swagger UI from a CDN: it does not work offline, and it lets a foreign script into the API's
origin. The package `fastapi_offline` carries Swagger UI's files.
"""

from importlib.resources import as_file, files
from pathlib import Path

from fastapi import APIRouter

from omni_server.api.web.page import asset_router, load_asset, page_headers

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
    page = load_asset(_OWN / "index.html")
    assets = {"start.js": load_asset(_OWN / "start.js")}
    with as_file(files("fastapi_offline") / "static") as folder:
        assets |= {name: load_asset(folder / name) for name in _SWAGGER_UI}
    return asset_router(DOCS, page, f"{DOCS}/", assets, _HEADERS)
