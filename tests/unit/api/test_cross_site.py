"""Pages of other web sites cannot use a server without keys through somebody's browser."""

import pytest

from omni_server.api.config import ApiConfig, CorsRules
from tests.unit.api.clients import URL, app_of, chat, error_of, http_client, tone
from tests.unit.api.fake_generator import FakeGenerator
from tests.unit.api.test_auth import KEY, WebSocketCall, bearer

OWN = "http://localhost:8091"
ALLOWED_SITE = "https://ok.example"
CONFIG = ApiConfig(cors=CorsRules(allowed_origins=(ALLOWED_SITE,)))
LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}

OTHERS = [
    {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "http://["},
    {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"},
    {"Origin": OWN, "Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
    {"Sec-Fetch-Site": "something new"},
]
WELCOME = [
    {},
    {"Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
    {"Origin": OWN},
    {"Origin": OWN.upper()},
    {"Origin": OWN, "Sec-Fetch-Site": "same-origin"},
    {"Origin": "https://public.example", "Sec-Fetch-Site": "same-origin"},  # behind a proxy that changes Host
    {"Origin": ALLOWED_SITE, "Sec-Fetch-Site": "cross-site"},
    {"Origin": ALLOWED_SITE},
]


@pytest.mark.parametrize("headers", OTHERS, ids=str)
async def test_requests_of_other_sites_are_refused_before_their_body_is_read(headers: dict[str, str]) -> None:
    generator = FakeGenerator()
    async with http_client(app_of(generator, CONFIG), headers={"Host": "localhost:8091"} | headers) as client:
        for response in (
            await client.post(
                "/v1/audio/transcriptions",
                data={"model": "omni"},
                files={"file": ("a.wav", tone(), "audio/wav")},
            ),
            await client.post(URL, content=b"{}", headers={"Content-Type": "text/plain"}),
            await client.post(URL, json=chat()),
            await client.get("/v1/models"),
            await client.post("/", data={"a": "b"}),
        ):
            error = error_of(response, 403)
            assert (error["type"], error["code"]) == ("permission_error", "origin_not_allowed")
    assert generator.requests == []
    call = await WebSocketCall({"Host": "localhost:8091"} | headers).run(CONFIG)
    assert call.status == 403
    assert call.error()["code"] == "origin_not_allowed"


@pytest.mark.parametrize("headers", WELCOME, ids=str)
async def test_the_own_page_allowed_sites_and_programs_are_served(headers: dict[str, str]) -> None:
    async with http_client(
        app_of(FakeGenerator(), CONFIG), headers={"Host": "localhost:8091"} | headers
    ) as client:
        assert (await client.post(URL, json=chat())).status_code == 200
        assert (await client.get("/web/app.js")).status_code == 200
    assert (await WebSocketCall({"Host": "localhost:8091"} | headers).run(CONFIG)).status == 101


async def test_a_link_on_another_site_opens_the_page() -> None:
    async with http_client(app_of(FakeGenerator()), headers=LINK) as client:
        for path in ("/", "/web/style.css", "/openapi.json"):
            assert (await client.get(path)).status_code == 200
            assert (await client.get(path, headers={"Sec-Fetch-Dest": "iframe"})).status_code == 403
        assert (await client.post(URL, json=chat())).status_code == 403
    assert (await WebSocketCall(LINK).run(ApiConfig())).status == 403


@pytest.mark.parametrize("headers", OTHERS, ids=str)
@pytest.mark.parametrize(
    "config",
    [ApiConfig(api_keys=(KEY,)), ApiConfig(cors=CorsRules(allowed_origins=("*",)))],
    ids=["key", "all sites"],
)
async def test_keys_and_openness_to_all_sites_need_no_origin(
    config: ApiConfig, headers: dict[str, str]
) -> None:
    async with http_client(app_of(FakeGenerator(), config), headers=headers | bearer(KEY)) as client:
        assert (await client.post(URL, json=chat())).status_code == 200
    assert (await WebSocketCall(headers | bearer(KEY)).run(config)).status == 101
