"""The web page at `/` and the API's description at `/docs`: static files, in memory, under a strict
Content-Security-Policy.

The page itself is `/`, everything that it loads lies below `/web/`. Both are public: they hold nothing but
the program of the page, which asks the user for an API key where the server wants one.

`/docs` is Swagger UI on `/openapi.json`, all of it from this server. FastAPI's own page loads Swagger UI from
a CDN: it does not work offline, and it lets a foreign script into the API's origin. The package
`fastapi_offline` carries Swagger UI's files.
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
    # blob: are files that the user has chosen.
    return _asset_router("/", page, ASSETS_PREFIX, assets, "img-src 'self' blob:")


def docs_router() -> APIRouter:
    page = _load_asset(_DOCS / _PAGE)
    assets = {"start.js": _load_asset(_DOCS / "start.js")}
    with as_file(files("fastapi_offline") / "static") as folder:
        assets |= {name: _load_asset(folder / name) for name in _SWAGGER_UI}
    # data: are the pictures in Swagger UI's style sheet. Speech that was tried out is a blob:.
    return _asset_router(DOCS, page, f"{DOCS}/", assets, "img-src 'self' data:")


def load_assets() -> dict[str, Asset]:
    """The files of the page by their names. Nothing else can be asked for: requests never touch the file
    system."""
    return {file.name: _load_asset(file) for file in sorted(_STATIC.iterdir()) if file.suffix in _MEDIA_TYPES}


def _load_asset(file: Path) -> Asset:
    content = file.read_bytes()
    return Asset(content, _MEDIA_TYPES[file.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _asset_router(
    path: str, page: Asset, prefix: str, assets: Mapping[str, Asset], img_src: str
) -> APIRouter:
    """Serves `page` at `path` and each of `assets` at `prefix` and its name. They may load and do only what the
    Content-Security-Policy allows: nothing from other hosts, no inline scripts or styles, no embedding."""
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
        # Checked at each use: modules of different releases must not meet, and their names are the same in all.
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
    """304 without a body where the client has this very version."""
    headers = {**headers, "etag": asset.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if asset.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)
