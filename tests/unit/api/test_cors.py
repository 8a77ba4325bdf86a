"""Browsers of other web sites: nothing unless they are allowed, and then errors included."""

import pytest

from omni_server.api.config import ApiConfig, CorsRules
from tests.unit.api.clients import URL, app_of, chat, error_of, http_client
from tests.unit.api.fake_generator import FakeGenerator
from tests.unit.api.test_auth import KEY, bearer

SITE = "https://chat.example"
ALLOWED = ApiConfig(api_keys=(KEY,), max_body_bytes=1000, cors=CorsRules(allowed_origins=(SITE,)))
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def test_cors_is_off_by_default() -> None:
    async with http_client(app_of(FakeGenerator()), headers={"Origin": SITE}) as client:
        for response in (await client.post(URL, json=chat()), await client.options(URL, headers=PREFLIGHT)):
            assert error_of(response, 403)["code"] == "origin_not_allowed"
            assert not [name for name in response.headers if name.startswith("access-control")]


async def test_preflight_of_an_allowed_site_passes_without_a_key() -> None:
    async with http_client(app_of(FakeGenerator(), ALLOWED), headers={"Origin": SITE}) as client:
        response = await client.options(URL, headers=PREFLIGHT)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == SITE
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("status", [200, 400, 401, 404, 405, 413, 500])
async def test_every_answer_to_an_allowed_site_can_be_read_by_it(status: int) -> None:
    generator = FakeGenerator()
    if status == 500:
        generator.submit_error = RuntimeError("surprise")
    method, path, body = {
        400: ("POST", URL, chat(None)),
        404: ("GET", "/v1/nope", None),
        405: ("GET", URL, None),
        413: ("POST", URL, chat("x" * 2000)),
    }.get(status, ("POST", URL, chat()))
    headers = {"Origin": SITE} | bearer("wrong" if status == 401 else KEY)
    async with http_client(app_of(generator, ALLOWED), headers=headers) as client:
        response = await client.request(method, path, json=body)
    assert response.status_code == status
    if status != 200:
        error_of(response, status)
    assert response.headers["access-control-allow-origin"] == SITE
    exposed = response.headers["access-control-expose-headers"]
    assert {"x-request-id", "retry-after"} <= set(exposed.split(", "))


async def test_every_site_may_be_allowed() -> None:
    config = ApiConfig(cors=CorsRules(allowed_origins=("*",)))
    async with http_client(
        app_of(FakeGenerator(), config), headers={"Origin": "https://any.example"}
    ) as client:
        response = await client.get("/v1/models")
    assert response.headers["access-control-allow-origin"] == "*"
