"""The web page's files as the server hands them out."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import httpx2
import pytest

from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import app_of, error_of, http_client

STATIC = Path(__file__).parents[4] / "omni_server" / "api" / "web" / "static"
ASSETS = sorted(file.name for file in STATIC.iterdir() if file.name != "index.html")


async def get(path: str, method: str = "GET", **headers: str) -> httpx2.Response:
    async with http_client(app_of(None)) as client:  # before the model is there
        return await client.request(
            method, path, headers={name.replace("_", "-"): headers[name] for name in headers}
        )


def page() -> str:
    return (STATIC / "index.html").read_text()


class Tags(HTMLParser):
    """All start tags of a page: `(name, attributes)`."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def references(html: str) -> set[str]:
    return {value for _, a in Tags(html).found for value in (a.get("src"), a.get("href")) if value}


async def test_the_page_is_there_before_the_model_is() -> None:
    response = await get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text == page()


@pytest.mark.parametrize("name", ASSETS)
async def test_every_file_is_served_with_its_type(name: str) -> None:
    response = await get(f"/web/{name}")
    types = {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
    assert response.status_code == 200
    assert response.headers["content-type"] == types[Path(name).suffix]
    assert response.content == (STATIC / name).read_bytes()


@pytest.mark.parametrize("path", ["/", "/web/app.js"])
async def test_policy_allows_nothing_but_the_servers_own_files(path: str) -> None:
    headers = (await get(path)).headers
    policy = dict(
        directive.strip().partition(" ")[::2] for directive in headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert {source for sources in policy.values() for source in sources.split()} == {
        "'none'",
        "'self'",
        "blob:",
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "microphone=(self)" in headers["permissions-policy"]


@pytest.mark.parametrize("name", ["index.html", "guide.html"])
def test_pages_have_no_inline_script_or_style(name: str) -> None:
    for tag, attributes in Tags((STATIC / name).read_text()).found:
        assert tag != "style"
        assert tag != "script" or attributes.get("src")
        assert not [name for name in attributes if name == "style" or name.startswith("on")], (
            tag,
            attributes,
        )


def test_no_file_names_another_host() -> None:
    for file in STATIC.iterdir():
        hosts = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+", file.read_text()))
        assert hosts <= {"http://www.w3.org"}, file.name  # the name of SVG's namespace


async def test_all_that_the_files_refer_to_is_served() -> None:
    wanted = {name for name in references(page()) if not name.startswith("#")}
    scripts = "".join(file.read_text() for file in STATIC.glob("*.js"))
    modules = re.findall(r'(?:from|import) "\./([^"]+)"|new URL\("([^"]+)", import\.meta\.url\)', scripts)
    wanted |= {f"web/{first or second}" for first, second in modules}
    guide = (STATIC / "guide.html").read_text()
    wanted |= {urljoin("web/guide.html", name) for name in references(guide)} - {""}
    assert {"web/style.css", "web/app.js", "web/samples.js", "web/capture-worklet.js"} <= wanted
    async with http_client(app_of(None)) as client:
        for name in wanted:
            assert (await client.get(f"/{name}")).status_code == 200, name
    unused = {f"web/{name}" for name in ASSETS} - wanted
    assert unused == set()


@pytest.mark.parametrize("path", ["/", "/web/app.js"])
async def test_a_client_that_has_this_version_is_told_so(path: str) -> None:
    first = await get(path)
    assert first.headers["cache-control"] == "no-cache"
    again = await get(path, if_none_match=f'"other", W/{first.headers["etag"]}')
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert (await get(path, if_none_match='"other"')).status_code == 200


@pytest.mark.parametrize("path", ["/", "/web/app.js"])
async def test_head_has_the_headers_without_the_body(path: str) -> None:
    head, whole = await get(path, "HEAD"), await get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]
    assert error_of(await get(path, "POST"), 405)["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path",
    [
        "/web",
        "/web/",
        "/web/index.html",
        "/web/missing.js",
        "/web/../page.py",
        "/web/static/app.js",
        "/web/..%2fpage.py",
        "/web/%2e%2e/page.py",
        "/web/app.js/",
        "/web//etc/passwd",
        "/index.html",
    ],
)
async def test_nothing_else_is_served(path: str) -> None:
    async with AsgiCall(app_of(None), path=path, method="GET") as call:
        assert (await call.message())["status"] == 404
        assert b"unknown_url" in (await call.message())["body"]
