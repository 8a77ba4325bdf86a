"""The page at /docs: Swagger UI from this server alone."""

import re

import pytest

from omni_server.api.config import ApiConfig
from tests.unit.api.clients import app_of, error_of, http_client

FILES = ("docs/swagger-ui.css", "docs/swagger-ui-bundle.js", "docs/start.js", "web/icon.svg")


@pytest.mark.parametrize("root_path", ["", "/omni"])
async def test_docs_refer_to_files_of_this_server_only(root_path: str) -> None:
    async with http_client(app_of(None, ApiConfig(root_path=root_path))) as client:
        page = await client.get(f"{root_path}/docs")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert set(re.findall(r'(?:src|href)="([^"]*)"', page.text)) == set(FILES)
        for name in FILES:
            assert (await client.get(f"{root_path}/{name}")).status_code == 200, name
        assert (await client.get(f"{root_path}/openapi.json")).status_code == 200


@pytest.mark.parametrize("path", ["/docs", "/docs/swagger-ui-bundle.js"])
async def test_policy_of_the_docs_lets_no_other_host_in(path: str) -> None:
    async with http_client(app_of(None)) as client:
        policy = (await client.get(path)).headers["content-security-policy"]
    directives = dict(directive.strip().partition(" ")[::2] for directive in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == directives["style-src"] == directives["connect-src"] == "'self'"
    assert not re.search(r"https?:|\*|unsafe-eval", policy)


async def test_there_is_no_second_page_and_no_other_file() -> None:
    async with http_client(app_of(None)) as client:
        for path in ("/redoc", "/docs/redoc.standalone.js", "/docs/index.html", "/docs/..%2fpage.py"):
            assert error_of(await client.get(path), 404)["code"] == "unknown_url"
