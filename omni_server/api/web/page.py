"""The web page at `/`: static files, in memory, under a strict Content-Security-Policy.

The page itself is `/`, everything that it loads lies below `/web/`. Both are public: they hold nothing but the program
of the page, which asks the user for an API key where the server wants one.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

ASSETS_PREFIX = "/web/"

_STATIC = Path(__file__).parent / "static"
_PAGE = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def page_headers(*policy: str) -> dict[str, str]:
    """Of a page and its files, which may load and do only what the Content-Security-Policy's directives allow."""
    fixed = ("default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
    return {
        # Checked at each use: modules of different releases must not meet, and their names are the same in all.
        "cache-control": "no-cache",
        "content-security-policy": "; ".join((*fixed, *policy)),
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "microphone=(self), camera=(), geolocation=()",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


_HEADERS = page_headers(
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' blob:",
    "media-src blob:",
    "connect-src 'self'",
)
"""Nothing from other hosts, no inline scripts or styles, no embedding. blob: are files that the user has chosen."""


@dataclass(frozen=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


def load_assets() -> dict[str, Asset]:
    """The files of the page by their names. Nothing else can be asked for: requests never touch the file system."""
    return {file.name: load_asset(file) for file in sorted(_STATIC.iterdir()) if file.suffix in _MEDIA_TYPES}


def load_asset(file: Path) -> Asset:
    content = file.read_bytes()
    return Asset(content, _MEDIA_TYPES[file.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def page_router() -> APIRouter:
    assets = load_assets()
    page = assets.pop(_PAGE)
    return asset_router("/", page, ASSETS_PREFIX, assets, _HEADERS)


def asset_router(
    path: str, page: Asset, prefix: str, assets: Mapping[str, Asset], headers: Mapping[str, str]
) -> APIRouter:
    """Serves `page` at `path` and each of `assets` at `prefix` and its name."""
    router = APIRouter(include_in_schema=False)

    @router.head(path)
    @router.get(path)
    async def show_page(request: Request) -> Response:
        return respond(request, page, headers)

    @router.head(prefix + "{name}")
    @router.get(prefix + "{name}")
    async def show_asset(request: Request, name: str) -> Response:
        if name not in assets:
            raise HTTPException(404)
        return respond(request, assets[name], headers)

    return router


def respond(request: Request, asset: Asset, headers: Mapping[str, str]) -> Response:
    """304 without a body where the client has this very version."""
    headers = {**headers, "etag": asset.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if asset.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)
