"""Serves the web page at `/` and the API docs at `/docs`: static files, in memory, with a strict
Content-Security-Policy.

The page is at `/`, and everything that it loads is under `/web/`. Both are public: they contain only the
page's program, which asks the user for an API key if the server needs one.

`/docs` is Swagger UI for `/openapi.json`, entirely from this server. FastAPI's own page loads Swagger UI from
a CDN: it does not work offline, and it lets a foreign script into the API's origin. The package
`fastapi_offline` contains Swagger UI's files.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

ASSETS_PREFIX = "/web/"
DOCS = "/docs"

_STATIC = Path(__file__).parent / "static"
_DOCS = Path(__file__).parent / "docs"
_PAGE = "index.html"
_SWAGGER_UI = ("swagger-ui.css", "swagger-ui-bundle.js")
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


def page_router() -> APIRouter:
    assets = load_assets()
    page = assets.pop(_PAGE)
    # blob: is for files that the user chose.
    return _asset_router("/", page, ASSETS_PREFIX, assets, "img-src 'self' blob:")


def docs_router() -> APIRouter:
    page = _load_asset(_DOCS / _PAGE)
    assets = {"start.js": _load_asset(_DOCS / "start.js")}
    with as_file(files("fastapi_offline") / "static") as folder:
        assets |= {name: _load_asset(folder / name) for name in _SWAGGER_UI}
    # data: is for the images in Swagger UI's style sheet. Generated speech is a blob:.
    return _asset_router(DOCS, page, f"{DOCS}/", assets, "img-src 'self' data:")


def load_assets() -> dict[str, Asset]:
    """Reads the page's files, keyed by name. Only these can be requested: requests never access the file
    system."""
    return {file.name: _load_asset(file) for file in sorted(_STATIC.iterdir()) if file.suffix in _MEDIA_TYPES}


def _load_asset(file: Path) -> Asset:
    content = file.read_bytes()
    return Asset(content, _MEDIA_TYPES[file.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _asset_router(
    path: str, page: Asset, prefix: str, assets: Mapping[str, Asset], img_src: str
) -> APIRouter:
    """Serves `page` at `path` and each of `assets` at `prefix` plus its name. The Content-Security-Policy
    forbids content from other hosts, inline scripts and styles, and embedding."""
    policy = (
        "default-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "script-src 'self'",
        "style-src 'self'",
        img_src,
        "media-src blob:",
        "connect-src 'self'",
    )
    headers = {
        # Revalidated on each use: modules of different releases must not mix, and their names are the same.
        "cache-control": "no-cache",
        "content-security-policy": "; ".join(policy),
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "microphone=(self), camera=(), geolocation=()",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    router = APIRouter(include_in_schema=False)

    @router.head(path)
    @router.get(path)
    async def show_page(request: Request) -> Response:
        return _respond(request, page, headers)

    @router.head(prefix + "{name}")
    @router.get(prefix + "{name}")
    async def show_asset(request: Request, name: str) -> Response:
        if name not in assets:
            raise HTTPException(404)
        return _respond(request, assets[name], headers)

    return router


def _respond(request: Request, asset: Asset, headers: Mapping[str, str]) -> Response:
    """Responds with 304 if the client already has this version."""
    headers = {**headers, "etag": asset.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if asset.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)
